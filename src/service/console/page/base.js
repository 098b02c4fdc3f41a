"use strict";
// What all tabs use: the key, the requests to the server, and small helpers.

const KEY = "trireme console key";
const element = id => document.getElementById(id);
// The answers by request, in a file that `trireme report` wrote; null where a server answers.
const REPORT = element("report") && JSON.parse(element("report").textContent);

// The key is behind `#` in the address that was printed. It is kept in this tab alone, and taken out of the address.
function takeKey() {
  const found = /^#key=(.+)$/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem(KEY, decodeURIComponent(found[1]));
  history.replaceState(null, "", location.pathname);
}

class Refused extends Error {}

// Requests a value from the server, or from the report. Throws Refused with its reason.
async function ask(name, query = {}) {
  if (REPORT) {
    const answer = REPORT[[name, ...Object.values(query)].join(" ")];
    if (answer !== undefined) return answer;
    throw new Refused("This report leaves that out, to stay small: `trireme watch RUN --web` shows all of the run.");
  }
  const key = sessionStorage.getItem(KEY), text = new URLSearchParams(query).toString();
  const reply = await fetch(`api/${name}${text ? `?${text}` : ""}`, {headers: key ? {authorization: `Bearer ${key}`} : {}});
  const answer = await reply.json();
  if (reply.ok) return answer;
  if (reply.status === 401 || reply.status === 403) element("ask-key").hidden = false;
  throw new Refused(answer.error ? answer.error.message : `status ${reply.status}`);
}

// Lets something that is clicked say what went wrong.
function act(work) {
  return async event => {
    try {
      await work(event);
      element("unreached").hidden = true;
    } catch (error) {
      element("unreached").textContent = error.message;
      element("unreached").hidden = false;
    }
  };
}

// Fills a `select` with [value, text] if that differs, and keeps what is chosen.
function fill(select, options) {
  const now = JSON.stringify(options), before = select.value;
  if (select.dataset.options === now) return;
  select.dataset.options = now;
  select.textContent = "";
  for (const [value, text] of options) make(select, "option", {value}, text);
  if (options.some(([value]) => String(value) === before)) select.value = before;
}
