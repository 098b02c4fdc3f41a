"use strict";
// Draws what each process of a run did when.

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
    `Attempt ${timeline.attempt}, ${shown}${REPORT && number && number < last - first + 1 ? "; `trireme report RUN --trace FILE` writes all, for ui.perfetto.dev" : ""}. Second 0 is ${timeline.start}.`,
    timeline.resolution ? ` Spans shorter than ${short(timeline.resolution * 1000)} ms are left out: fewer steps show more.` : "",
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
