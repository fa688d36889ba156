"use strict";
// Draw the page's panels; the menus choose what the panels show.

const data = JSON.parse(document.getElementById("data").textContent);
const color = (k) => `var(--run${k % 6})`;
const el = (id) => document.getElementById(id);

function make(kind, attributes, parent, text) {
  const element = Object.assign(document.createElement(kind), attributes);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function fill(select, options) {
  const kept = select.value;
  select.replaceChildren();
  for (const [value, text] of options) make("option", { value }, select, text);
  if (options.some(([value]) => String(value) === kept)) select.value = kept;
}

// Ignore inherited properties, because a layer or curve may be named like one of them, such as "constructor".
const get = (table, key) => (table && Object.hasOwn(table, key) ? table[key] : undefined);
const curveOf = (table, key) => get(table, key) || { steps: [], values: [] };

const union = (lists) => [...new Set(lists.flat())];
const title = (name) => name.charAt(0).toUpperCase() + name.slice(1).replaceAll("_", " ");

function legend(parent) {
  const row = make("div", { className: "legend" }, parent);
  data.runs.forEach((run, k) => {
    const item = make("span", {}, row);
    make("i", {}, item).style.background = color(k);
    item.append(run.name);
  });
}

function panel(parent, heading) {
  const box = make("div", { className: "panel" }, parent);
  if (heading) make("h3", {}, box, heading);
  return box;
}

// Create all panels before drawing: a chart is as wide as its panel, whose width depends on the number of panels.
function drawAll(parent, charts) {
  const panels = charts.map(([heading]) => panel(parent, heading));
  charts.forEach(([, options], k) => chart(panels[k], options));
}

function curves() {
  const key = el("curve").value;
  const accuracy = data.accuracies.includes(key);
  el("from-label").hidden = !accuracy;
  const box = el("curves");
  box.replaceChildren();
  if (innerWidth < 620) legend(box);
  const series = data.runs.map((run, k) => ({ name: run.name, color: color(k), ...curveOf(run.curves, key) }));
  const from = Number(el("from").value);
  const highest = Math.max(from, ...series.flatMap((one) => [...one.values, ...(one.high || [])].filter(Number.isFinite)));
  const range = accuracy ? [from, Math.min(1, Math.ceil(10.5 * highest) / 10)] : null;
  chart(panel(box), { series, yLabel: title(key), yRange: range, format: accuracy ? percent : number, height: 320 });
}

function unpack(layer) {
  if (!layer.values) layer.values = new Float32Array(Uint8Array.from(atob(layer.data), (c) => c.charCodeAt(0)).buffer);
  return layer.values;
}

const middle = (sorted) => sorted[(sorted.length - 1) >> 1];

// Return a unit's lowest, middle and highest percentiles by step; for "all", their medians over units.
function percentiles(run, layer, unit) {
  const values = unpack(layer);
  const { count, units } = layer;
  const k = unit === "typical" ? layer.typical : Number(unit);
  const at = (t, p) => {
    const start = (t * count + p) * units;
    return unit === "all" ? middle([...values.subarray(start, start + units)].sort((a, b) => a - b)) : values[start + k];
  };
  return [0, count >> 1, count - 1].map((p) => run.percentiles.steps.map((_, t) => at(t, p)));
}

function bands() {
  const [name, unit, shared] = [el("layer").value, el("unit").value, el("scale").value === "shared"];
  const box = el("bands");
  box.replaceChildren();
  const found = data.runs.flatMap((run, k) => {
    const layer = run.percentiles && run.percentiles.layers.find((l) => l.name === name);
    if (!layer || (!Number.isNaN(Number(unit)) && Number(unit) >= layer.units)) return [];
    const [low, values, high] = percentiles(run, layer, unit);
    const which = unit === "all" ? "median over units" : `unit ${unit === "typical" ? layer.typical : unit}`;
    return [{ name: run.name, which, color: color(k), steps: run.percentiles.steps, low, values, high, width: 1.7 }];
  });
  const all = found.flatMap((s) => [...s.low, ...s.high]).filter(Number.isFinite);
  const pad = (Math.max(...all) - Math.min(...all)) * 0.05 || 1;
  const range = shared && all.length ? [Math.min(...all) - pad, Math.max(...all) + pad] : null;
  drawAll(box, found.map((s) => [`${s.name}: ${s.which}`, { series: [s], yLabel: "Input of the nonlinearity", yRange: range, names: false }]));
}

function shift() {
  const measure = el("measure").value;
  el("measure-text").textContent = data.measures.find((m) => m.key === measure).text;
  const box = el("shift");
  box.replaceChildren();
  const layers = union(data.runs.map((run) => Object.keys(run.shift[measure] || {})));
  drawAll(box, layers.map((layer) => {
    const series = data.runs.map((run, k) => ({ name: run.name, color: color(k), width: 1.6, ...curveOf(run.shift[measure], layer) }));
    return [layer, { series, names: false, height: 210 }];
  }));
}

function start() {
  const parts = [[curves, ["curve", "from"], data.runs.some((r) => Object.keys(r.curves).length)]];
  fill(el("curve"), union(data.runs.map((r) => Object.keys(r.curves))).map((k) => [k, title(k)]));
  const ends = data.runs.flatMap((r) => data.accuracies.map((k) => curveOf(r.curves, k).values.at(-1)).filter(Number.isFinite));
  if (Math.min(...ends) < 0.8) el("from").value = "0";
  const watched = data.runs.filter((r) => r.percentiles);
  if (watched.length) {
    const layers = union(watched.map((r) => r.percentiles.layers.map((l) => l.name)));
    fill(el("layer"), layers.map((l) => [l, l]));
    el("layer").value = layers.at(-1);
    const units = () => {
      const sizes = watched.flatMap((r) => r.percentiles.layers.filter((l) => l.name === el("layer").value).map((l) => l.units));
      fill(el("unit"), [["typical", "typical (median drift)"], ["all", "all (median over units)"], ...Array.from({ length: Math.max(...sizes) }, (_, k) => [k, `unit ${k}`])]);
    };
    units();
    el("layer").addEventListener("change", units);
  }
  parts.push([bands, ["layer", "unit", "scale"], watched.length]);
  const measures = data.measures.filter((m) => data.runs.some((r) => r.shift[m.key]));
  fill(el("measure"), measures.map((m) => [m.key, m.name]));
  parts.push([shift, ["measure"], measures.length]);
  for (const [draw, menus, any] of parts) {
    if (!any) {
      el(menus[0]).closest("section").hidden = true;
      continue;
    }
    if (draw === shift) legend(el("shift-legend"));
    menus.forEach((id) => el(id).addEventListener("change", draw));
    draw();
    let width = innerWidth;
    addEventListener("resize", () => innerWidth !== width && ((width = innerWidth), draw()));
  }
  document.documentElement.dataset.ready = "true";
}

start();
