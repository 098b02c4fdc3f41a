"use strict";
// The page as a whole: its tabs, and how often they are renewed.
// Whatever comes from a run is put into the page as text, never as HTML.

const REFRESH_MS = 2000;
const TABS = {
  rooms: {title: "Rooms", show: overview => showRooms(overview)},
  curves: {title: "Curves", show: () => showCurves()},
  timeline: {title: "Timeline", show: () => showTimeline()},
  rollouts: {title: "Rollouts", show: () => showRollouts()},
  sessions: {title: "Sessions", show: () => showSessions()},
  logs: {title: "Logs", show: () => showLogs()},
};
let timer = 0;

// The tab that the address names, as `#curves` or `#/curves`; the first one if it names none.
const chosen = () => Object.keys(TABS).find(name => location.hash.replace("/", "") === `#${name}`) || "rooms";

function drawTabs() {
  if (REPORT) {
    document.body.classList.add("report");
    for (const name of ["sessions", "logs"]) delete TABS[name]; // a report may be sent to others
  }
  for (const [name, {title}] of Object.entries(TABS)) {
    const button = make(element("tabs"), "button", {type: "button", role: "tab", id: `tab-${name}`, "aria-controls": name}, title);
    button.addEventListener("click", () => { location.hash = `/${name}`; });
  }
}

function chooseTab() {
  for (const name of Object.keys(TABS)) {
    element(name).hidden = name !== chosen();
    element(`tab-${name}`).setAttribute("aria-selected", name === chosen());
  }
  refresh();
}

function drawHeadline(overview) {
  element("run").textContent = overview.run;
  document.title = `${overview.run}: ${overview.step}/${overview.target}`;
  element("headline").textContent = overview.headline.replaceAll("  ", " · ") + (overview.unread ? `; ${overview.unread} bytes of its metrics are still to be read` : "");
  element("trouble").textContent = overview.trouble;
  element("trouble").hidden = !overview.trouble;
}

// Asks for how the run is and renews the tab that is shown; one refresh at a time.
async function refresh() {
  clearTimeout(timer);
  const mine = timer = setTimeout(refresh, 10 * REFRESH_MS);
  try {
    const overview = await ask("run");
    element("ask-key").hidden = true;
    drawHeadline(overview);
    await TABS[chosen()].show(overview);
    element("unreached").hidden = true;
  } catch (error) {
    element("unreached").textContent = error instanceof Refused ? error.message
      : `The console does not answer (${error.message}). What is shown may be old.`;
    element("unreached").hidden = false;
  }
  if (mine === timer) {
    clearTimeout(timer);
    if (REPORT) return;
    timer = setTimeout(refresh, document.hidden ? 10 * REFRESH_MS : REFRESH_MS);
  }
}

element("ask-key").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem(KEY, element("key").value.trim());
  element("key").value = "";
  refresh();
});
takeKey();
drawTabs();
if (REPORT) addEventListener("resize", refresh);
addEventListener("hashchange", () => { takeKey(); chooseTab(); });
addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
chooseTab();
