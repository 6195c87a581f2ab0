// The first page: what came of the run, in sentences, and the curves to look at first.

const FIRST = [
  "reward/mean",
  "evaluation/reward_mean",
  "train/loss",
  "evaluation/loss",
  "train/entropy_nats",
  "rollout/logprob_gap_mean_nats",
  "rollout/response_tokens_mean",
  "throughput/tokens_per_s",
  "time/step_s",
];

function firstAndLast(run, name) {
  const known = (curveOf(run, name)?.values || []).filter((value) => value !== null);
  return known.length > 1 ? [known[0], known[known.length - 1]] : null;
}

function sentences(run) {
  const found = [`${number(run.done)} of ${number(run.steps)} steps are done.`];
  const told = [
    ["evaluation/reward_mean", "The reward of greedy answers to held-out prompts"],
    ["reward/mean", "The reward in training"],
    ["train/loss", "The loss"],
  ];
  for (const [name, what] of told.slice(0, curveOf(run, "reward/mean") ? 2 : 3)) {
    const ends = firstAndLast(run, name);
    if (ends) found.push(`${what} went from ${number(ends[0], 3)} to ${number(ends[1], 3)}.`);
  }
  const phases = phaseTotals(run);
  const whole = phases.reduce((sum, [, value]) => sum + value, 0);
  if (phases.length > 1) {
    const [one, two] = phases;
    found.push(`Most time went to ${one[0]} (${percent(one[1], whole)}) and ${two[0]} (${percent(two[1], whole)}).`);
  }
  const count = run.warnings.reduce((sum, each) => sum + each.count, 0);
  found.push(count === 1 ? "There was 1 warning." : `There were ${count ? number(count) : "no"} warnings.`);
  return found.join(" ");
}

// The error that ended a run, if one did.
function ended({ failure }) {
  return failure
    ? el("p", { class: "card failure" }, el("b", {}, `The run ended early, after step ${failure.step - 1}: `), failure.text)
    : null;
}

// Seconds of each phase over the whole run, the longest first. The timeline also has what ran between steps, such as
// evaluations, of which the metrics of a step know nothing.
function phaseTotals(run) {
  const sums = new Map(stepPhases(run));
  const timed = run.times.roles.filter(({ role }) => !/^engine \d+$/.test(role));
  if (timed.length) for (const name of [...sums.keys()]) if (name !== "other") sums.delete(name);
  for (const { phases } of timed)
    for (const [name, value] of Object.entries(phases)) sums.set(name, (sums.get(name) || 0) + value);
  return ranked([...sums]);
}

// Seconds of each phase inside of steps, by their metrics, the longest first.
function stepPhases(run) {
  return ranked(
    run.curves
      .filter((curve) => /^time\/\w+_s$/.test(curve.name) && isPhase(run, curve.name))
      .map((curve) => [curve.name.slice(5, -2), curve.values.reduce((sum, value) => sum + (value || 0), 0)]),
  );
}

function ranked(sums) {
  return sums.filter(([, value]) => value > 0).sort((one, two) => two[1] - one[1]);
}

function phaseBar(run) {
  const totals = phaseTotals(run);
  const whole = totals.reduce((sum, [, value]) => sum + value, 0);
  if (!totals.length) return el("p", { class: "quiet" }, "No step has been timed yet.");
  return el(
    "div",
    {},
    el(
      "div",
      { class: "bar" },
      totals.map(([name, value], place) =>
        el("span", { style: `width:${(100 * value) / whole}%;background:${phaseColour(name, place)}`, title: name }),
      ),
    ),
    el(
      "div",
      { class: "legend" },
      totals.map(([name, value], place) =>
        el(
          "span",
          {},
          el("span", { class: "swatch", style: `background:${phaseColour(name, place)}` }),
          `${name} ${seconds(value)} (${percent(value, whole)})`,
        ),
      ),
    ),
  );
}

function overviewTab() {
  const runs = comparedRuns();
  const names = FIRST.filter((name) => runs.some(({ run }) => curveOf(run, name))).slice(0, 6);
  const cards = el(
    "div",
    { class: "grid" },
    names.map((name) => curveCard(name, runs)),
  );
  if (runs.length > 1)
    return [
      el("h2", {}, "Where the runs differ, and where they ended"),
      comparison(names),
      el("h2", {}, "Curves to look at first"),
      cards,
    ];
  return [
    el("p", { class: "lead" }, sentences(runs[0].run)),
    ended(runs[0].run),
    el("h2", {}, "Curves to look at first"),
    cards,
    el("h2", {}, "Where the time went"),
    el("div", { class: "card" }, phaseBar(runs[0].run)),
    ...profileLinks(runs[0].run),
  ];
}

// The files of profiled steps, which lie beside the page.
function profileLinks(run) {
  if (!run.profiles.length) return [];
  const rows = run.profiles.map(({ step, files }) => [
    `step ${step}`,
    el(
      "span",
      {},
      files.flatMap(({ name, address }) => [el("a", { href: address.split("/").map(encodeURIComponent).join("/") }, name), " "]),
    ),
  ]);
  return [el("h2", {}, "Profiles"), el("div", { class: "card" }, table(["", "files"], rows))];
}

// A row for each run: what distinguishes it, and where it ended. A click on a heading sorts, one on a run picks it.
function comparison(names) {
  const all = comparedRuns();
  const keys = differingKeys(state.data.runs).filter((key) => !/^(output|name|steps|logging\..*)$/.test(key));
  const columns = [
    ["run", (run) => run.label],
    ...keys.map((key) => [key, (run) => run.settings[key]]),
    ["steps done", (run) => run.done],
    ...names.map((name) => [name, (run) => lastOf(run, name)]),
  ];
  const again = () => show(state.tab);
  const heads = columns.map(([title], place) => {
    const arrow = state.order?.place === place ? (state.order.down ? " \u2193" : " \u2191") : "";
    const sort = () => {
      state.order = { place, down: state.order?.place === place ? !state.order.down : true };
      again();
    };
    return el("th", {}, el("button", { class: "head", title: "Sort by this", onclick: sort }, breakable(title), arrow));
  });
  const rows = sorted(all, columns).map((each) => {
    const { run } = each;
    const pick = () => {
      if (!state.picked.delete(run)) state.picked.add(run);
      again();
    };
    const cells = columns.slice(1).map(([, of]) => {
      const found = of(run);
      return el("td", { class: typeof found === "number" ? "number" : null }, typeof found === "number" ? number(found) : value(found));
    });
    const name = el("button", { class: "head", "aria-pressed": String(state.picked.has(run)), onclick: pick }, lineSwatch(each), run.label);
    return el("tr", { class: state.picked.has(run) ? "picked" : null }, el("td", {}, name), cells);
  });
  return el(
    "div",
    { class: "card compared" },
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows))),
    el(
      "p",
      { class: "quiet" },
      "First the settings that differ, then each metric at the last step that has it. A click on a heading sorts; one on a run " +
        "brings its curves out, another one puts them back.",
    ),
  );
}

// A dotted or slashed name that may go on in the next line after each of its parts.
function breakable(name) {
  return name.split(/(?<=[./_])/).flatMap((part) => [part, el("wbr")]);
}

function sorted(runs, columns) {
  if (!state.order) return runs;
  const [, of] = columns[state.order.place];
  const sign = state.order.down ? -1 : 1;
  const known = (found) => found !== null && found !== undefined;
  return [...runs].sort((one, two) => {
    const [left, right] = [of(one.run), of(two.run)];
    // What is not known comes last, whichever way.
    if (!known(left) || !known(right)) return Number(known(right)) - Number(known(left));
    if (typeof left === "number" && typeof right === "number") return sign * (left - right);
    return sign * String(left).localeCompare(String(right), "en", { numeric: true });
  });
}
