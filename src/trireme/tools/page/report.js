"use strict";
// Puts what `trireme report` has read into its page.

const data = JSON.parse(document.getElementById("data").textContent);

function drawFacts() {
  document.getElementById("run").textContent = data.run;
  document.title = `${data.run}: a run of Trireme`;
  for (const [name, value] of data.facts) {
    const row = make(document.getElementById("facts"), "tr");
    make(row, "td", {}, name);
    make(row, "td", {}, value);
  }
}

function drawIncidents() {
  const {newest, older} = data.incidents;
  document.getElementById("happened").hidden = !newest.length;
  document.getElementById("incidents-note").textContent =
    `The newest first; times are UTC.${older ? ` ${older} older ones are in incidents.jsonl.` : ""}`;
  for (const [at, attempt, step, part, what] of newest) {
    const row = make(document.getElementById("incidents"), "tr");
    for (const text of [at, `attempt ${attempt}, step ${step}`, part, what]) make(row, "td", {}, text);
  }
}

function drawPanels() {
  document.getElementById("panels").textContent = "";
  document.getElementById("curves-note").textContent = data.panels.length
    ? "One point a step; of a long run the lowest and the highest of neighbours." : "No step is finished yet.";
  data.panels.forEach(panel => drawPanel(document.getElementById("panels"), panel));
}

drawFacts();
drawIncidents();
drawAges(document.getElementById("ages"), data.ages);
const box = document.getElementById("timeline"), note = document.getElementById("timeline-note");
note.textContent = data.timeline ? timelineNote(data.timeline) : "This run has no trace: it ran with trace.max_mb = 0, or on other machines.";
const paintTimeline = data.timeline ? drawTimeline(box, data.timeline) : () => {};
const draw = () => { drawPanels(); paintTimeline(); };
draw();
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
