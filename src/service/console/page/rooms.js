"use strict";
// The tabs Rooms, Curves and Timeline.

function ageText(seconds) {
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const [size, unit] = units.find(([size]) => seconds >= size) || [1, "s"];
  return `${Math.floor(Math.max(0, seconds) / size)} ${unit} ago`;
}

function drawRows(table, head, rows, of = row => row) {
  table.textContent = "";
  if (head.length) {
    const line = make(table, "tr");
    for (const name of head) make(line, "th", {scope: "col"}, name);
  }
  for (const row of rows) {
    const line = make(table, "tr");
    for (const cell of of(row)) make(line, "td", {}, cell ?? "");
  }
}

function showRooms(overview) {
  element("standing").textContent = overview.standing;
  drawRows(element("parts"), ["part", "health", "since", "restarts", "processes", "node", "why"], overview.parts, part =>
    [part.name, part.health, ageText(overview.now - part.since), part.restarts || "", part.pids.join(" "), part.node.slice(0, 8), part.why]);
  for (const cell of element("parts").querySelectorAll("tr td:nth-child(2)")) cell.className = cell.textContent;
  if (!overview.parts.length) make(make(element("parts"), "tr"), "td", {}, "STATUS is not written yet");
  const rooms = element("room-metrics");
  rooms.textContent = "";
  for (const [room, metrics] of Object.entries(overview.rooms)) {
    const box = make(rooms, "div");
    make(box, "strong", {}, room);
    drawRows(make(box, "table"), [], metrics, ([name, value]) => [name, typeof value === "number" ? short(value) : value]);
  }
  drawRows(element("incidents"), [], overview.incidents, each => [each.at, `attempt ${each.attempt}, step ${each.step}`, each.part, each.what]);
  if (!overview.incidents.length) make(make(element("incidents"), "tr"), "td", {}, "nothing has happened to any part");
  element("incidents-note").textContent =
    `The newest first; times are UTC.${overview.incidents_older ? ` ${overview.incidents_older} older ones are in incidents.jsonl.` : ""}`;
  drawRows(element("facts"), [], overview.facts);
}

// ------------------------------------------------------------------------------------------------------------- curves

let drawnCurves = "";

async function showCurves() {
  const told = await ask("curves"), now = JSON.stringify(told);
  fill(element("metric"), [["", "choose one"], ...told.names.map(name => [name, name])]);
  if (now === drawnCurves) return;
  drawnCurves = now;
  element("curves-note").textContent = told.panels.length
    ? `${told.rows} steps; of a long run the first, the last, and the lowest and the highest of neighbours are drawn.` : "No step is finished yet.";
  element("panels").textContent = "";
  told.panels.forEach(panel => drawPanel(element("panels"), panel));
  element("ages").textContent = "";
  drawAges(element("ages"), told.ages);
  await showMetric();
}

async function showMetric() {
  const name = element("metric").value, panel = name ? await ask("curve", {name}) : {curves: []};
  element("one-metric").textContent = "";
  if (panel.curves.length) drawPanel(element("one-metric"), panel);
}

element("metric").addEventListener("change", event => act(showMetric)(event));

// ----------------------------------------------------------------------------------------------------------- timeline

let drawnTimeline = "", paintTimeline = () => {};

async function showTimeline() {
  if (drawnTimeline && (REPORT || !element("follow").checked)) return;
  const told = await ask("timeline", REPORT ? {} : {steps: element("steps").value}), now = JSON.stringify(told);
  if (now === drawnTimeline) return;
  drawnTimeline = now;
  element("timeline-note").textContent = told ? timelineNote(told)
    : "This run has no trace: it ran with trace.max_mb = 0, on other machines, or has not begun.";
  element("timeline-box").textContent = "";
  paintTimeline = told ? drawTimeline(element("timeline-box"), told) : () => {};
  paintTimeline();
}

function redrawTimeline(event) {
  drawnTimeline = "";
  return act(showTimeline)(event);
}

element("steps").addEventListener("change", redrawTimeline);
element("follow").addEventListener("change", redrawTimeline);
// Whoever moves in the timeline wants it to stand still.
for (const kind of ["pointerdown", "keydown", "dblclick"])
  element("timeline-box").addEventListener(kind, () => { element("follow").checked = false; });
addEventListener("resize", () => { drawnCurves = ""; paintTimeline(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => paintTimeline());
