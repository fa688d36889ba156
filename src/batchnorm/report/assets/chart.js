"use strict";
// One line chart as SVG: lines, bands, axes, names at the lines' ends, values under the pointer.

const SVG = "http://www.w3.org/2000/svg";

function node(kind, attributes, parent, text) {
  const element = document.createElementNS(SVG, kind);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step + 0); // + 0 turns -0 into 0
  return found;
}

const number = (v) => (Number.isFinite(v) ? v.toLocaleString("en", { maximumSignificantDigits: 4 }) : "–");
const percent = (v) => (Number.isFinite(v) ? `${(100 * v).toFixed(2)}%` : "–");
const thousands = (v) => (v >= 1000 ? `${Number((v / 1000).toPrecision(4))}K` : `${v}`);

// Push overlapping labels apart within the plot, keeping their order.
function spread(wanted, gap, top, bottom) {
  const order = wanted.map((y, k) => [y, k]).sort((a, b) => a[0] - b[0]);
  let last = -Infinity;
  for (const item of order) last = item[0] = Math.max(item[0], last + gap, top);
  last = Infinity;
  for (const item of order.reverse()) last = item[0] = Math.min(item[0], last - gap, bottom);
  const placed = [];
  for (const [y, k] of order) placed[k] = y;
  return placed;
}

// series: [{name, color, steps, values, width, low, high}]; low and high are the edges of a band.
function chart(panel, { series, yLabel = "", yRange = null, format = number, names = true, height = 260 }) {
  panel.querySelectorAll("svg, .tip").forEach((old) => old.remove());
  const shown = series.filter((s) => s.steps.length);
  if (!shown.length) return;
  const width = Math.max(panel.clientWidth, 220);
  const beside = names && width >= 520;
  const room = beside ? Math.min(14 + 7 * Math.max(...shown.map((s) => s.name.length)), width / 2) : 14;
  const box = { left: 46, right: width - room, top: yLabel ? 24 : 10, bottom: height - 36 };
  const steps = shown.flatMap((s) => [s.steps[0], s.steps.at(-1)]);
  const all = shown.flatMap((s) => [...s.values, ...(s.low || []), ...(s.high || [])]).filter(Number.isFinite);
  let [low, high] = yRange || [Math.min(...all), Math.max(...all)];
  if (!yRange) {
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    [low, high] = [low - (low >= 0 && low - pad < 0 ? low : pad), high + pad];
  }
  const [first, end] = [Math.min(...steps), Math.max(...steps, Math.min(...steps) + 1)];
  const x = (s) => box.left + ((s - first) / (end - first)) * (box.right - box.left);
  const y = (v) => box.bottom - ((v - low) / (high - low)) * (box.bottom - box.top);
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" }, panel);
  node("title", {}, svg, `${yLabel} over training steps: ${shown.map((s) => s.name).join(", ")}`);
  const clip = `clip${(chart.count = (chart.count || 0) + 1)}`;
  const area = { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top };
  node("rect", area, node("clipPath", { id: clip }, svg));
  for (const v of ticks(low, high, 5)) {
    node("line", { class: "grid", x1: box.left, x2: box.right, y1: y(v), y2: y(v) }, svg);
    node("text", { x: box.left - 7, y: y(v) + 4, "text-anchor": "end" }, svg, format === percent ? `${+(100 * v).toFixed(2)}%` : number(v));
  }
  for (const s of ticks(first, end, Math.min(6, width / 90)))
    node("text", { x: x(s), y: box.bottom + 18, "text-anchor": "middle" }, svg, thousands(s));
  node("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, svg);
  node("text", { x: box.left - 38, y: 13 }, svg, yLabel);
  node("text", { x: box.right, y: height - 3, "text-anchor": "end" }, svg, "training steps");
  const plot = node("g", { "clip-path": `url(#${clip})` }, svg);
  const path = (s, values) =>
    s.steps.map((step, k) => [x(step), y(values[k])]).filter((p) => Number.isFinite(p[1])).map((p) => p.map((c) => c.toFixed(1)).join(" "));
  for (const s of shown) {
    if (s.low) {
      const edge = [...path(s, s.low), ...path(s, s.high).reverse()];
      node("path", { class: "band", d: `M${edge.join("L")}Z`, fill: s.color, opacity: 0.16 }, plot);
      for (const values of [s.low, s.high])
        node("path", { d: `M${path(s, values).join("L")}`, fill: "none", stroke: s.color, "stroke-width": 0.9, opacity: 0.75 }, plot);
    }
    node("path", { class: "line", d: `M${path(s, s.values).join("L")}`, fill: "none", stroke: s.color, "stroke-width": s.width || 2, "stroke-linejoin": "round" }, plot);
  }
  if (beside) {
    const places = spread(shown.map((s) => y(s.values.findLast(Number.isFinite)) + 4), 14, box.top, box.bottom);
    // Set the property, because the page's Content-Security-Policy forbids style attributes.
    shown.forEach((s, k) => (node("text", { class: "name", x: box.right + 8, y: places[k] }, svg, s.name).style.fill = s.color));
  }
  point(panel, svg, { shown, x, box, format });
}

function point(panel, svg, { shown, x, box, format }) {
  const rule = node("line", { class: "rule", y1: box.top, y2: box.bottom, visibility: "hidden" }, svg);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  panel.append(tip);
  const hide = () => ((tip.hidden = true), rule.setAttribute("visibility", "hidden"));
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    if (at < box.left - 8 || at > box.right + 8) return hide();
    const nearest = (s) => s.steps.reduce((best, step, k) => (Math.abs(x(step) - at) < Math.abs(x(s.steps[best]) - at) ? k : best), 0);
    const found = shown.map((s) => [s, nearest(s)]);
    const step = found[0][0].steps[found[0][1]];
    tip.replaceChildren(`step ${step.toLocaleString("en")}`);
    for (const [s, k] of found) {
      const line = document.createElement("div");
      const value = document.createElement("b");
      value.style.color = s.color;
      value.textContent = s.low ? `${format(s.low[k])} · ${format(s.values[k])} · ${format(s.high[k])}` : format(s.values[k]);
      line.append(value, ` ${s.name}`);
      tip.append(line);
    }
    rule.setAttribute("visibility", "visible");
    rule.setAttribute("x1", x(step));
    rule.setAttribute("x2", x(step));
    tip.hidden = false;
    const left = Math.min(Math.max(x(step) + 12, 0), panel.clientWidth - tip.offsetWidth);
    tip.style.left = `${left + tip.offsetWidth > panel.clientWidth - 2 ? x(step) - tip.offsetWidth - 12 : left}px`;
    tip.style.top = `${svg.offsetTop + box.top}px`;
  });
}
