"use strict";
// The tab Logs: the end of a log, which is renewed, or older parts of it.

let logEnd = null, logStart = 0;

async function showLogs() {
  const logs = await ask("logs");
  const title = each => `${each.name}, attempt ${each.attempt}${each.now ? "" : " (earlier)"}`;
  fill(element("log-name"), logs.length ? logs.map(each => [`${each.attempt}/${each.name}`, title(each)]) : [["", "there are none yet"]]);
  if (logEnd === null) await showLog();
}

// Shows the part of the log before byte `end`; null: its last lines, which are renewed.
async function showLog(end = null) {
  const chosen = element("log-name").value, [attempt, name] = chosen.split("/"), text = element("log-text");
  logEnd = end;
  if (!name) {
    text.textContent = element("log-note").textContent = "";
    return;
  }
  const told = await ask("log", end === null ? {attempt, name} : {attempt, name, end});
  if (chosen !== element("log-name").value || end !== logEnd) return; // another part was chosen meanwhile
  const below = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
  if (text.textContent !== told.text) text.textContent = told.text;
  logStart = told.start;
  element("log-note").textContent = `bytes ${told.start} to ${told.end} of ${told.bytes}`;
  element("older").disabled = told.start === 0;
  if (end === null && below) text.scrollTop = text.scrollHeight;
}

element("log-name").addEventListener("change", act(() => showLog()));
element("older").addEventListener("click", act(() => showLog(logStart)));
element("newest").addEventListener("click", act(() => showLog()));
