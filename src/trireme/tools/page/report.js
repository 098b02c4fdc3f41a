"use strict";
// Draws what `trireme report` put into the page: facts, curves, ages, and the timeline.

const data = JSON.parse(document.getElementById("data").textContent);
const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const short = value => Math.abs(value) >= 1e6 || (value && Math.abs(value) < 1e-3) ? value.toExponential(1) : String(+value.toPrecision(4));

function make(parent, name, attributes = {}, text = "") {
  const isSvg = parent.namespaceURI.endsWith("svg") || name === "svg";
  const node = document.createElementNS(isSvg ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return parent.appendChild(node);
}

const tip = document.getElementById("tip");
function showTip(event, text) {
  tip.hidden = !text;
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4)}px`;
}

// At most `most` + 1 round values between `low` and `high`, at steps of 1, 2 or 5 times a power of ten.
function ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => power * factor >= rough * 0.999);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) values.push(+(i * step).toPrecision(12));
  return values;
}

function drawLegend(parent, entries) {
  const legend = make(parent, "div", {class: "legend"});
  for (const [name, css] of entries) {
    const entry = make(legend, "span");
    make(entry, "i", {style: `background: var(--${css})`});
    entry.append(name);
  }
}

// ------------------------------------------------------------------------------------- facts, incidents, curves, ages

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

function drawPanel(panel) {
  const figure = make(document.getElementById("panels"), "figure");
  const caption = make(figure, "figcaption", {}, panel.title + " ");
  make(caption, "span", {}, panel.unit);
  drawLegend(figure, panel.curves.map((curve, i) => [curve.name, `c${i}`]));
  const image = make(figure, "svg", {role: "img", "aria-label": panel.title});
  const width = figure.clientWidth - 24, height = 170, left = 48, right = 8, top = 8, bottom = 22;
  image.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const all = panel.curves.flatMap(curve => curve.points), xs = all.map(point => point[0]), ys = all.map(point => point[1]);
  const fold = (pick, values) => values.reduce((a, b) => pick(a, b));
  let [x0, x1, y0, y1] = [fold(Math.min, xs), fold(Math.max, xs), fold(Math.min, ys), fold(Math.max, ys)];
  if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
  if (y0 === y1) [y0, y1] = [y0 - Math.abs(y0 || 1) / 2, y1 + Math.abs(y1 || 1) / 2];
  const X = x => left + (x - x0) / (x1 - x0) * (width - left - right);
  const Y = y => height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom);
  for (const y of ticks(y0, y1, 4)) {
    make(image, "line", {class: "grid", x1: left, x2: width - right, y1: Y(y), y2: Y(y)});
    make(image, "text", {x: left - 6, y: Y(y) + 4, "text-anchor": "end"}, short(y));
  }
  for (const x of ticks(x0, x1, 5).filter(Number.isInteger))
    make(image, "text", {x: X(x), y: height - 6, "text-anchor": "middle"}, x);
  make(image, "text", {x: 0, y: height - 6}, "step");
  panel.curves.forEach((curve, i) => {
    const d = curve.points.map(([x, y], at) => `${at ? "L" : "M"}${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join("");
    make(image, "path", {d, style: `stroke: var(--c${i})`});
    if (curve.points.length < 40)
      for (const [x, y] of curve.points) make(image, "circle", {cx: X(x), cy: Y(y), r: 2, style: `fill: var(--c${i})`});
  });
  const cursor = make(image, "line", {class: "cursor", y1: top, y2: height - bottom, visibility: "hidden"});
  image.addEventListener("pointermove", event => {
    const x = x0 + (event.offsetX - left) / (width - left - right) * (x1 - x0);
    const near = points => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    const step = near(all)[0];
    const lines = panel.curves.map(curve => [curve.name, near(curve.points)]);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, X(step));
    cursor.setAttribute("visibility", "visible");
    showTip(event, [`step ${step}`, ...lines.map(([name, point]) => `${name}: ${short(point[1])}${point[0] === step ? "" : ` (step ${point[0]})`}`)].join("\n"));
  });
  image.addEventListener("pointerleave", event => { cursor.setAttribute("visibility", "hidden"); showTip(event, ""); });
}

function drawPanels() {
  document.getElementById("panels").textContent = "";
  document.getElementById("curves-note").textContent = data.panels.length
    ? "One point a step; of a long run the lowest and the highest of neighbours." : "No step is finished yet.";
  data.panels.forEach(drawPanel);
}

function drawAges() {
  const table = document.getElementById("ages"), {counts, bound} = data.ages;
  const total = counts.reduce((sum, [, count]) => sum + count, 0), most = Math.max(...counts.map(([, count]) => count));
  for (const [age, count] of counts) {
    const row = make(table, "tr", {class: age === bound ? "bound" : "", title: age === bound ? "the bound: orchestrator.max_steps_off_policy" : ""});
    make(row, "td", {}, `${age} step${age === 1 ? "" : "s"}`);
    make(make(row, "td"), "i", {style: `width: ${100 * count / most}%`});
    make(row, "td", {}, `${count} (${(100 * count / total).toFixed(1)} %)${age === bound ? ", the bound" : ""}`);
  }
  if (!counts.length) make(make(table, "tr"), "td", {}, "No group has been trained on yet.");
}

// ----------------------------------------------------------------------------------------------------------- timeline

const ROW = 18, THIN = 4, HEAD = 24, GAP = 8, COUNTER = 26;

// Where everything is: [{top, height, kind: "row" | "counter" | "name", ...}], and the height of all.
function layout(processes) {
  const places = [];
  let top = HEAD;
  for (const process of processes) {
    places.push({top, height: ROW, name: process.name});
    top += ROW;
    for (const track of process.tracks) {
      track.rows.forEach((row, i) => {
        const height = track.rows.length > 4 ? THIN : ROW;
        places.push({top, height: height - 1, label: i ? "" : track.name, spans: row, track: track.name});
        top += height;
      });
      if (track.rows.length > 4) top += 4;
    }
    for (const counter of process.counters) {
      places.push({top: top + 2, height: COUNTER, label: "in flight", points: counter.points, most: Math.max(1, ...counter.points.map(point => point[1]))});
      top += COUNTER + 2;
    }
    top += GAP;
  }
  return [places, top + 18];
}

function timelineNote(timeline) {
  const number = timeline.steps.length, [first, last] = timeline.traced || [];
  const shown = number ? `steps ${timeline.steps[0][0]} to ${timeline.steps[number - 1][0]} of ${first} to ${last}` : "no step is finished yet";
  return [
    `Attempt ${timeline.attempt}, ${shown}${number && number < last - first + 1 ? "; others by --steps FIRST:LAST" : ""}. Second 0 is ${timeline.start}.`,
    timeline.resolution ? ` Neighbours shorter than ${short(timeline.resolution * 1000)} ms are drawn as one: fewer steps show more.` : "",
    ...timeline.processes.flatMap(process => process.tracks.filter(track => track.leftOut).map(
      track => ` ${process.name}: ${track.leftOut} of ${track.name} found no row.`)),
    timeline.full.length ? ` The traces of ${timeline.full.join(", ")} ended at trace.max_mb.` : "",
    timeline.leftOut ? ` ${timeline.leftOut} more processes are in the trace.` : "",
  ].join("");
}

function drawTimeline(parent, timeline) {
  const [places, height] = layout(timeline.processes);
  const kinds = new Set(places.flatMap(place => (place.spans || []).map(span => span[3])));
  drawLegend(parent, [...kinds].map(kind => [kind, kind]));  // names of kinds are names of colours
  const buttons = make(parent, "div", {class: "buttons"});
  const canvas = make(parent, "canvas", {tabindex: 0, role: "img", "aria-label": "spans of all processes over time"});
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d"), colors = {};
  let from = 0, to = timeline.seconds || 1, width = 0, left = 0;
  const X = second => left + (second - from) / (to - from) * (width - left);
  const second = x => from + (x - left) / (width - left) * (to - from);

  function paint() {
    width = canvas.clientWidth;
    left = width < 700 ? 84 : 150;
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.textBaseline = "middle";
    for (const kind of kinds) colors[kind] = color(kind);
    context.save();
    context.beginPath();
    context.rect(left, 0, width - left, height);
    context.clip();
    for (const place of places) if (place.spans) paintSpans(place); else if (place.points) paintCounter(place);
    paintAxis();
    context.restore();
    for (const place of places) {
      context.font = `${place.name ? 600 : 400} 12px system-ui, sans-serif`;
      context.fillStyle = color(place.name ? "text" : "quiet");
      context.fillText(place.name || place.label, place.name ? 6 : 14, place.top + (place.height === THIN - 1 ? 6 : place.height / 2), left - 18);
    }
  }
  function paintSpans({top, height, spans}) {
    context.font = "11px system-ui, sans-serif";
    for (const [start, end, name, kind] of spans) {
      const x = X(start), w = Math.max(X(end) - x - (height < 8 ? 0.5 : 0), 0.7);
      if (x > width || x + w < left) continue;
      context.fillStyle = colors[kind];
      context.fillRect(x, top, w, height);
      const inside = Math.max(x, left);
      if (height > 8 && x + w - inside > context.measureText(name).width + 8) {
        context.fillStyle = {waiting: color("text"), optimizer: "#1d2329"}[kind] || "#fff";
        context.fillText(name, inside + 4, top + height / 2 + 0.5);
      }
    }
  }
  function paintCounter({top, height, points, most}) {
    context.fillStyle = color("sampling");
    context.globalAlpha = 0.45;
    points.forEach(([at, value], i) => {
      const next = i + 1 < points.length ? points[i + 1][0] : timeline.seconds, h = value / most * height;
      context.fillRect(X(at), top + height - h, X(next) - X(at), h);
    });
    context.globalAlpha = 1;
  }
  function paintAxis() {
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = color("quiet");
    let line = left - 1, free = left - 1; // from where on there is room for another line, and another name
    for (const [step, start] of timeline.steps) {
      const x = X(start), named = x >= free;
      if (x > width || !(named || x >= line)) continue;
      context.globalAlpha = 0.5;
      context.fillRect(x, HEAD - 6, 1, height - HEAD - 10);
      context.globalAlpha = 1;
      line = x + 8;
      if (!named) continue;
      context.fillText(`step ${step}`, x + 4, 10);
      free = x + context.measureText(`step ${step}`).width + 14;
    }
    for (const at of ticks(from, to, Math.max(2, (width - left) / 110))) context.fillText(`${short(at)} s`, X(at) + 2, height - 8);
  }
  function look(newFrom, newTo) {
    const length = Math.min(Math.max(newTo - newFrom, 1e-4), timeline.seconds || 1);
    from = Math.min(Math.max(newFrom, 0), (timeline.seconds || 1) - length);
    to = from + length;
    requestAnimationFrame(paint);
  }
  const zoom = (factor, at = (from + to) / 2) => look(at - (at - from) * factor, at + (to - at) * factor);
  const pan = share => look(from + (to - from) * share, to + (to - from) * share);
  const actions = {"−": () => zoom(2), "+": () => zoom(0.5), "◀": () => pan(-0.5), "▶": () => pan(0.5), "all": () => look(0, timeline.seconds)};
  const keys = {"-": "−", "+": "+", "ArrowLeft": "◀", "ArrowRight": "▶", "0": "all"};
  for (const [name, action] of Object.entries(actions)) make(buttons, "button", {type: "button"}, name).addEventListener("click", action);
  make(buttons, "span", {class: "note"}, "drag to move, Ctrl and wheel to zoom, double-click for one step");
  canvas.addEventListener("keydown", event => { if (keys[event.key]) { event.preventDefault(); actions[keys[event.key]](); } });
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, second(event.offsetX));
  }, {passive: false});
  canvas.addEventListener("dblclick", event => {
    const step = timeline.steps.find(([, start, end]) => start <= second(event.offsetX) && second(event.offsetX) <= end);
    if (step) look(step[1], step[2]);
  });
  canvas.addEventListener("pointerdown", event => canvas.setPointerCapture(event.pointerId));
  canvas.addEventListener("pointermove", event => {
    if (event.buttons & 1) return pan(-event.movementX / (width - left));
    showTip(event, describe(event.offsetX, event.offsetY));
  });
  canvas.addEventListener("pointerleave", event => showTip(event, ""));
  function describe(x, y) {
    const at = second(x), place = places.find(place => y >= place.top && y <= place.top + place.height);
    if (x < left || !place) return "";
    if (place.points) return `${place.label} ${(place.points.findLast(point => point[0] <= at) || [0, 0])[1]}`;
    const slack = (to - from) / (width - left);
    const span = (place.spans || []).find(([start, end]) => start - slack <= at && at <= end + slack);
    if (!span) return "";
    const [start, end, name, , more] = span;
    return `${name}${place.track === name ? "" : ` (${place.track})`}: ${short((end - start) * 1000)} ms\n${short(start)} s to ${short(end)} s${more ? `\n${more}` : ""}`;
  }
  return paint;
}

drawFacts();
drawIncidents();
drawAges();
const box = document.getElementById("timeline"), note = document.getElementById("timeline-note");
note.textContent = data.timeline ? timelineNote(data.timeline) : "This run has no trace: it ran with trace.max_mb = 0, or on other machines.";
const paintTimeline = data.timeline ? drawTimeline(box, data.timeline) : () => {};
const draw = () => { drawPanels(); paintTimeline(); };
draw();
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
