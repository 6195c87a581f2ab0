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
  found.push(count ? `There were ${number(count)} warnings.` : "There were no warnings.");
  return found.join(" ");
}

// Seconds of each phase over all steps, the longest first.
function phaseTotals(run) {
  const sums = run.curves
    .filter((curve) => /^time\/\w+_s$/.test(curve.name) && isPhase(run, curve.name))
    .map((curve) => [curve.name.slice(5, -2), curve.values.reduce((sum, value) => sum + (value || 0), 0)]);
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
      el("h2", {}, `${runs.length} runs`),
      comparison(names),
      el("h2", {}, "Curves to look at first"),
      runLegend(),
      cards,
    ];
  return [
    el("p", { class: "lead" }, sentences(runs[0].run)),
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

// What distinguishes the runs, and where they ended.
function comparison(names) {
  const runs = state.data.runs;
  const keys = differingKeys(runs).filter((key) => !/^(output|name|steps|logging\..*)$/.test(key));
  const rows = [
    ["steps done", ...runs.map((run) => run.done)],
    ...names.map((name) => [name, ...runs.map((run) => lastOf(run, name))]),
    ...keys.map((key) => [el("code", { class: "differs" }, key), ...runs.map((run) => value(run.settings[key]))]),
  ];
  return el(
    "div",
    { class: "card compared" },
    table(["", ...runs.map((run) => run.label)], rows),
    el(
      "p",
      { class: "quiet" },
      "Metrics are those of the last step that has them. Below them are the settings that differ.",
    ),
  );
}
