// Where the time of a run went: by step, and by role with the time in which it waited.

const PHASE_COLOURS = {
  rollout: "#e69f00",
  reward: "#f0c808",
  train: "#0072b2",
  weight_sync: "#009e73",
  evaluation: "#cc79a7",
  checkpoint: "#8d6e63",
  reference: "#56b4e9",
  old_logprobs: "#7a6ff0",
  other: "#8a94a3",
  probe: "#6b8e23",
  account: "#b8b04a",
  record: "#a0785a",
  data: "#c9a227",
  proof: "#5f8f8f",
  values: "#9a6fb0",
  critic: "#5b7fbf",
  teacher: "#5fb0a0",
};

function phaseColour(name, place) {
  return PHASE_COLOURS[name] || PALETTE[(place + 3) % PALETTE.length];
}

// A phase, and not a part of one, which would count twice: parts of a checkpoint or a sync have its name before their own.
function isPhase(run, metric) {
  const name = metric.slice(5, -2);
  if (name === "step") return false;
  return (
    !run.curves.some((curve) => curve.name !== metric && metric.startsWith(curve.name.slice(0, -2) + "_")) &&
    !/^checkpoint_|^weight_sync_/.test(name)
  );
}

function stepTimes(run) {
  const phases = stepPhases(run).map(([name]) => name);
  const traces = phases.map((name, place) => {
    const curve = curveOf(run, `time/${name}_s`);
    return {
      x: curve.steps,
      y: curve.values,
      name,
      type: "bar",
      marker: { color: phaseColour(name, place) },
      hovertemplate: `${name} %{y:.3g} s<extra></extra>`,
    };
  });
  return chart(
    traces,
    {
      barmode: "stack",
      bargap: 0.05,
      showlegend: true,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal" },
      yaxis: { title: { text: "seconds" } },
      margin: { l: 60, r: 12, t: 8, b: 44 },
    },
    true,
  );
}

function lanes(run, steps) {
  const begin = Math.min(...steps.flatMap((line) => line.phases.map((each) => each.start_s)));
  const byName = new Map();
  for (const line of steps) {
    for (const each of line.phases)
      byName.set(each.name, [...(byName.get(each.name) || []), { ...each, step: line.step }]);
  }
  const traces = [...byName].map(([name, own], place) => ({
    type: "bar",
    orientation: "h",
    name,
    marker: { color: phaseColour(name, place) },
    y: own.map((each) => each.role),
    x: own.map((each) => each.end_s - each.start_s),
    base: own.map((each) => each.start_s - begin),
    customdata: own.map((each) => [each.step, each.end_s - each.start_s]),
    hovertemplate: `${plain(name)}, step %{customdata[0]}: %{customdata[1]:.3f} s<extra></extra>`,
  }));
  const engines = engineLanes(steps, begin);
  const rows = new Set([...traces, ...engines].flatMap((trace) => trace.y));
  const height = Math.max(300, 130 + 26 * rows.size);
  const node = chart(
    [...traces, ...engines],
    {
      height,
      barmode: "overlay",
      hovermode: "closest",
      showlegend: true,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal" },
      xaxis: { title: { text: "seconds", standoff: 4 } },
      margin: { l: 90, r: 12, t: 8, b: 44 },
    },
    true,
  );
  node.style.height = `${height}px`;
  return node;
}

// A row for each engine that samples all the time: the stronger its colour, the more of the time it had something to
// answer.
function engineLanes(steps, begin) {
  const lines = steps.filter((line) => line.engines);
  const bars = lines.flatMap(({ step, engines }) =>
    engines.busy_s.map((busy, place) => ({ step, engines, place, share: shareOf(busy, engines) })),
  );
  if (!bars.length) return [];
  return [
    {
      type: "bar",
      orientation: "h",
      name: "sampling",
      marker: { color: bars.map(({ share }) => `rgba(0,158,115,${(0.08 + 0.92 * share).toFixed(3)})`) },
      y: bars.map(({ place }) => `engine ${place}`),
      x: bars.map(({ engines }) => engines.end_s - engines.start_s),
      base: bars.map(({ engines }) => engines.start_s - begin),
      customdata: bars.map(({ step, share }) => [step, 100 * share]),
      hovertemplate: "%{y}, step %{customdata[0]}: busy %{customdata[1]:.3g} % of the time<extra></extra>",
    },
  ];
}

function shareOf(busy, { start_s, end_s }) {
  return end_s > start_s ? Math.min(1, busy / (end_s - start_s)) : 0;
}

// Lag of the trained tokens, and what attempts wait for, over the steps of an asynchronous run.
function attemptCharts(run) {
  const named = (prefix) => run.curves.filter((curve) => curve.name.startsWith(prefix));
  const lines = (curves, prefix, extra) =>
    curves.map((curve, place) => ({
      x: curve.steps,
      y: curve.values,
      name: plain(curve.name.slice(prefix.length)).replaceAll("_", " "),
      mode: curve.steps.length < 30 ? "lines+markers" : "lines",
      line: { color: PALETTE[place % PALETTE.length], width: 1.8 },
      hovertemplate: "%{y:.4g}<extra>%{fullData.name}</extra>",
      ...extra,
    }));
  const plot = (traces, title) =>
    chart(traces, {
      showlegend: true,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
      yaxis: { title: { text: title }, rangemode: "tozero" },
    });
  const states = named("rollout/attempts_at_");
  const groups = ["rollout/open_groups", "rollout/waiting_groups"].map((name) => curveOf(run, name)).filter(Boolean);
  const lags = named("rollout/lag_");
  if (!lags.length && !states.length) return [];
  const card = (title, text, node) => el("section", { class: "card" }, el("h3", {}, title), el("p", { class: "quiet meaning" }, text), node);
  return [
    el("h2", {}, "Attempts that go on while the policy trains"),
    el(
      "div",
      { class: "grid" },
      lags.length
        ? card("Lag", "How many updates older than the policy its tokens were, at the step that trained on them.", plot(lines(lags, "rollout/"), "updates"))
        : null,
      states.length
        ? card("Attempts by what they wait for", "At the end of each step.", plot(lines(states, "rollout/attempts_at_", { stackgroup: "all" }), "attempts"))
        : null,
      groups.length
        ? card("Groups", "Open: under way or done. Waiting: done, for a step to train on them.", plot(lines(groups, "rollout/"), "groups"))
        : null,
    ),
  ];
}

function roleRows(run) {
  return run.times.roles.map(({ role, phases, idle_s }) => {
    const busy = Object.values(phases).reduce((sum, each) => sum + each, 0);
    const most = Object.entries(phases)
      .slice(0, 5)
      .map(([name, value]) => `${name} ${seconds(value)}`)
      .join(", ");
    return [role, seconds(busy), seconds(idle_s), percent(idle_s, busy + idle_s), most];
  });
}

function timelineTab() {
  const run = chosenRun();
  const steps = run.times.steps;
  const parts = [el("h2", {}, "Seconds of each step"), el("div", { class: "card" }, stepTimes(run))];
  if (!steps.length)
    return [
      ...parts,
      el("p", { class: "quiet" }, "This run has no timeline.jsonl, so that roles cannot be told apart."),
    ];
  const asynchronous = Number(run.settings["loop.max_policy_lag"]) > 0;
  const note = asynchronous
    ? "The engines of this run sample all the time and have a row each: the stronger its colour, the more of a step's time the engine was busy (time/engine_idle_fraction is the rest). The driver's rollout is its wait for them."
    : "A role that has no bar waits. The driver is the loop itself: what needs no role of its own, such as syncs of weights.";
  const last = steps.slice(-10);
  const holder = el("div", { class: "card" });
  const choice = el("select", {
    "aria-label": "Steps",
    onchange: () => holder.replaceChildren(lanes(run, picks[choice.value])),
  });
  const picks = { "last steps": last, "first steps": steps.slice(0, 3), "all that are kept": steps };
  choice.append(...Object.keys(picks).map((name) => el("option", {}, name)));
  holder.append(lanes(run, last));
  parts.push(
    el("h2", {}, "What each role did"),
    el("p", { class: "quiet" }, note),
    el("div", { class: "row" }, choice),
    holder,
    el("h2", {}, "Roles over the whole run"),
    el("div", { class: "card" }, table(["role", "busy", "waiting", "share waiting", "phases"], roleRows(run))),
    ...attemptCharts(run),
    ...byStep(
      run,
      run.curves.map((curve) => curve.name).filter((name) => /^time\/\w+_idle_fraction$/.test(name)),
      "Waiting by step",
    ),
  );
  return parts;
}
