// Curves, drawn by Plotly once they come into view.

// Okabe and Ito's colours (https://jfly.uni-koeln.de/color), which colour-blind readers tell apart, without black and
// yellow, of which one of the two themes shows nothing.
const PALETTE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f"];
// More runs than colours differ by their lines.
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const drawn = new Map();
const waiting = new Map();
const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || !waiting.has(entry.target)) continue;
      const draw = waiting.get(entry.target);
      waiting.delete(entry.target);
      seen.unobserve(entry.target);
      draw();
    }
  },
  { rootMargin: "300px" },
);

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function colours() {
  const line = variable("--line");
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, exponentformat: "e" };
  return { font: { color: variable("--quiet"), size: 12 }, xaxis: axis, yaxis: axis };
}

function layout(extra = {}) {
  const base = colours();
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 56, r: 12, t: 8, b: 34 },
    hovermode: "x",
    showlegend: false,
    ...extra,
    font: base.font,
    xaxis: { automargin: true, title: { text: "step", standoff: 4 }, ...base.xaxis, ...extra.xaxis },
    yaxis: { automargin: true, ...base.yaxis, ...extra.yaxis },
  };
}

// Plotly reads a few tags in the texts that it draws.
function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

function chart(traces, extra = {}, tall = false) {
  const node = el("div", { class: tall ? "chart tall" : "chart" });
  waiting.set(node, () => {
    Plotly.newPlot(node, traces, layout(extra), { displaylogo: false, displayModeBar: false, responsive: true });
    drawn.set(node, extra);
  });
  seen.observe(node);
  return node;
}

function recolour() {
  for (const [node, extra] of drawn) {
    if (node.isConnected) Plotly.relayout(node, layout(extra));
    else drawn.delete(node);
  }
}

function smoothed(values, weight) {
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

// One curve of each run that has it. With smoothing the measured one stays, pale.
function curveTraces(name, runs, smooth) {
  const few = runs.every(({ run }) => (curveOf(run, name)?.steps.length || 0) < 30);
  return runs.flatMap(({ run, colour, dash }) => {
    const curve = curveOf(run, name);
    if (!curve) return [];
    const trace = {
      x: curve.steps,
      y: curve.values,
      name: plain(run.label),
      mode: few ? "lines+markers" : "lines",
      line: { color: colour, dash, width: 1.8 },
      opacity: state.picked.size && !state.picked.has(run) ? 0.15 : 1,
      marker: { size: 5 },
      hovertemplate: `%{y:.5g}<extra>${plain(run.label)}</extra>`,
    };
    if (!smooth || few) return [trace];
    const pale = { ...trace, opacity: 0.28, hoverinfo: "skip", hovertemplate: undefined };
    return [pale, { ...trace, y: smoothed(curve.values, 0.9) }];
  });
}

// Between few steps Plotly would mark halves of them.
function isShort(name, runs) {
  const steps = runs.flatMap(({ run }) => curveOf(run, name)?.steps || []);
  return Math.max(...steps) - Math.min(...steps) < 5;
}

// What is never below 0 gets no room below 0, also where it is 0 all the time.
function isNegative(name, runs) {
  return runs.some(({ run }) => curveOf(run, name)?.values.some((value) => value < 0));
}

function curveCard(name, runs, smooth = false) {
  const curve = runs.map(({ run }) => curveOf(run, name)).find(Boolean);
  const last = runs.length === 1 ? lastOf(runs[0].run, name) : null;
  return el(
    "section",
    { class: "card" },
    el("h3", {}, name, last === null ? "" : el("span", { class: "quiet" }, `  last ${number(last)}`)),
    el("p", { class: "quiet meaning" }, curve.meaning),
    chart(curveTraces(name, runs, smooth), {
      xaxis: isShort(name, runs) ? { dtick: 1 } : {},
      yaxis: { rangemode: isNegative(name, runs) ? "normal" : "nonnegative" },
    }),
  );
}

function comparedRuns() {
  return state.data.runs.map((run, place) => ({
    run,
    colour: PALETTE[place % PALETTE.length],
    dash: DASHES[Math.floor(place / PALETTE.length) % DASHES.length],
  }));
}

function runLegend() {
  if (state.data.runs.length < 2) return null;
  return el(
    "div",
    { class: "legend row" },
    comparedRuns().map((each) => el("span", {}, lineSwatch(each), each.run.label)),
  );
}

// A piece of a run's line, as its curves have it.
function lineSwatch({ colour, dash }) {
  const style = { solid: "solid", dot: "dotted" }[dash] || "dashed";
  return el("span", { class: "line", style: `border-top:3px ${style} ${colour}` });
}

function curvesTab() {
  const runs = comparedRuns();
  const names = [...new Set(runs.flatMap(({ run }) => run.curves.map((curve) => curve.name)))];
  const matters = new Set(
    runs.flatMap(({ run }) => run.curves.filter((curve) => curve.first).map((curve) => curve.name)),
  );
  const filter = el("input", {
    id: "search",
    type: "search",
    placeholder: "Find a metric ( / )",
    "aria-label": "Find a metric",
  });
  const smooth = el("input", { type: "checkbox", id: "smooth" });
  const places = el("div");
  function show() {
    const wanted = names.filter((name) => name.toLowerCase().includes(filter.value.toLowerCase()));
    const parts = new Map([["What matters first", wanted.filter((name) => matters.has(name))]]);
    for (const name of wanted.filter((each) => !matters.has(each))) {
      const area = name.split("/")[0];
      parts.set(area, [...(parts.get(area) || []), name]);
    }
    places.replaceChildren(
      ...[...parts]
        .filter(([, own]) => own.length)
        .flatMap(([title, own]) => [
          el("h2", {}, title),
          el(
            "div",
            { class: "grid" },
            own.map((name) => curveCard(name, runs, smooth.checked)),
          ),
        ]),
    );
    if (!wanted.length) places.replaceChildren(el("p", {}, "No metric has this in its name."));
  }
  filter.addEventListener("input", show);
  smooth.addEventListener("change", show);
  show();
  return [el("div", { class: "row" }, filter, el("label", {}, smooth, " smooth"), runLegend()), places];
}
