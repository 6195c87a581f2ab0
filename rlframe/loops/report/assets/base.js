"use strict";
// What all parts of the page share. Texts of a run enter the page as text nodes only, never as HTML.

const state = { data: null, run: 0, tab: "", theme: "light", picked: new Set(), order: null };

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined)
      node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (each) => each.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en").replaceAll(",", " ");
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6
    ? String(Number(value.toPrecision(digits)))
    : value.toExponential(2);
}

function seconds(value) {
  if (value < 60) return `${number(value, 3)} s`;
  if (value < 7200) return `${number(value / 60, 3)} min`;
  return `${number(value / 3600, 3)} h`;
}

function percent(part, whole) {
  return whole > 0 ? `${number((100 * part) / whole, 3)} %` : "-";
}

function chosenRun() {
  return state.data.runs[state.run];
}

function curveOf(run, name) {
  return run.curves.find((curve) => curve.name === name);
}

function lastOf(run, name) {
  const curve = curveOf(run, name);
  if (!curve) return null;
  for (let place = curve.values.length - 1; place >= 0; place--)
    if (curve.values[place] !== null) return curve.values[place];
  return null;
}

function table(heads, rows) {
  const isNumber = (cell) => typeof cell === "number" || /^[\d.e+-]+ (%|s|min|h)$/.test(cell);
  const numeric = heads.map((_, place) => rows.some((row) => isNumber(row[place])));
  const cell = (tag, value, place) =>
    el(tag, { class: numeric[place] ? "number" : null }, typeof value === "number" ? number(value) : (value ?? "-"));
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          heads.map((head, place) => cell("th", head, place)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((row) =>
          el(
            "tr",
            {},
            row.map((value, place) => cell("td", value, place)),
          ),
        ),
      ),
    ),
  );
}
