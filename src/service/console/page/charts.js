"use strict";
// Draws charts and tables.

const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const short = value => Math.abs(value) >= 1e6 || (value && Math.abs(value) < 1e-3) ? value.toExponential(1) : String(+value.toPrecision(4));

function make(parent, name, attributes = {}, text = "") {
  const isSvg = parent.namespaceURI.endsWith("svg") || name === "svg";
  const node = document.createElementNS(isSvg ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", name);
  for (const [key, value] of Object.entries(attributes))
    if (key === "style") node.style.cssText = value;  // a policy against styles in attributes allows this
    else node.setAttribute(key, value);
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

function drawPanel(parent, panel) {
  const figure = make(parent, "figure", panel.wide ? {class: "wide"} : {});
  const caption = make(figure, "figcaption", {}, panel.title + " ");
  make(caption, "span", {}, panel.unit);
  drawLegend(figure, panel.curves.map((curve, i) => [curve.name, `c${i}`]));
  const image = make(figure, "svg", {role: "img", "aria-label": panel.title});
  const width = figure.clientWidth - 24, height = image.clientHeight, left = 48, right = 16, top = 8, bottom = 22;
  image.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const all = panel.curves.flatMap(curve => curve.points), xs = all.map(point => point[0]), ys = all.map(point => point[1]);
  const fold = (pick, values) => values.reduce((a, b) => pick(a, b));
  let [x0, x1, y0, y1] = [fold(Math.min, xs), fold(Math.max, xs), fold(Math.min, ys), fold(Math.max, ys)];
  if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
  if (y0 === y1) [y0, y1] = [Math.min(0, 2 * y0), Math.max(0, 2 * y1) || (y0 ? 0 : 1)]; // a constant has 0 on its axis
  const X = x => left + (x - x0) / (x1 - x0) * (width - left - right);
  const Y = y => height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom);
  for (const y of ticks(y0, y1, height / 24)) {
    make(image, "line", {class: "grid", x1: left, x2: width - right, y1: Y(y), y2: Y(y)});
    make(image, "text", {x: left - 6, y: Y(y) + 4, "text-anchor": "end"}, short(y));
  }
  for (const x of ticks(x0, x1, Math.min(width / 45, 20)).filter(Number.isInteger))
    make(image, "text", {x: X(x), y: height - 6, "text-anchor": "middle"}, x);
  make(image, "text", {x: 0, y: height - 6}, "step");
  const line = points => points.map(([x, y], at) => `${at ? "L" : "M"}${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join("");
  const drawn = [];
  panel.curves.forEach((curve, i) => {
    const d = line(curve.points);
    // A curve that lies on an earlier one is dashed, so that both are seen.
    const dashes = drawn.includes(d) ? `; stroke-dasharray: 6 ${6 * drawn.length}` : "";
    make(image, "path", {d, class: curve.smooth ? "raw" : "", style: `stroke: var(--c${i})${dashes}`});
    drawn.push(d);
    if (curve.smooth) make(image, "path", {d: line(curve.smooth), class: "smooth", style: `stroke: var(--c${i})`});
    if (curve.points.length < 40)
      for (const [x, y] of curve.points) make(image, "circle", {cx: X(x), cy: Y(y), r: 2, style: `fill: var(--c${i})`});
  });
  const cursor = make(image, "line", {class: "cursor", y1: top, y2: height - bottom, visibility: "hidden"});
  image.addEventListener("pointermove", event => {
    const x = x0 + (event.offsetX - left) / (width - left - right) * (x1 - x0);
    const near = points => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    const step = near(all)[0];
    const lines = panel.curves.flatMap(curve =>
      [[curve.name, near(curve.points)], ...(curve.smooth ? [["smoothed", near(curve.smooth)]] : [])]);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, X(step));
    cursor.setAttribute("visibility", "visible");
    showTip(event, [`step ${step}`, ...lines.map(([name, point]) => `${name}: ${short(point[1])}${point[0] === step ? "" : ` (step ${point[0]})`}`)].join("\n"));
  });
  image.addEventListener("pointerleave", event => { cursor.setAttribute("visibility", "hidden"); showTip(event, ""); });
}

// A table of the ages of trained groups: {counts: [[age, groups], ...], bound}.
function drawAges(table, {counts, bound}) {
  const total = counts.reduce((sum, [, count]) => sum + count, 0), most = Math.max(...counts.map(([, count]) => count));
  for (const [age, count] of counts) {
    const row = make(table, "tr", {class: age === bound ? "bound" : "", title: age === bound ? "the bound: orchestrator.max_steps_off_policy" : ""});
    make(row, "td", {}, `${age} step${age === 1 ? "" : "s"}`);
    make(make(row, "td"), "i", {style: `width: ${100 * count / most}%`});
    make(row, "td", {}, `${count} (${(100 * count / total).toFixed(1)} %)${age === bound ? ", the bound" : ""}`);
  }
  if (!counts.length) make(make(table, "tr"), "td", {}, "No group has been trained on yet.");
}
