// Data, configuration and warnings.

function value(setting) {
  return setting === null || setting === undefined
    ? "null"
    : typeof setting === "string"
      ? setting
      : JSON.stringify(setting);
}

function differingKeys(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  return keys.filter((key) => new Set(runs.map((run) => value(run.settings[key]))).size > 1);
}

// The curves of one run under a heading. Nothing if there are none.
function byStep(run, names, title) {
  if (!names.length) return [];
  return [
    el("h2", {}, title),
    el(
      "div",
      { class: "grid" },
      names.map((name) => curveCard(name, [{ run, colour: PALETTE[0] }])),
    ),
  ];
}

function dataTab() {
  const run = chosenRun();
  const { ended } = run;
  const names = run.curves
    .map((curve) => curve.name)
    .filter((name) =>
      /^data\/|^rollout\/(dropped|lag|carried|waiting|open|masked|truncated)|^reward\/(flat|unscored|failed)/.test(
        name,
      ),
    );
  const cards = byStep(run, names, "By step");
  if (ended.trouble) return [el("p", {}, ended.trouble), ...cards];
  if (!ended.rows) return [el("p", { class: "quiet" }, "This run has no ledger: it does not sample."), ...cards];
  const tokens = ended.rows.reduce((sum, row) => sum + row.tokens, 0);
  const parts = [
    el(
      "p",
      { class: "lead" },
      `${number(ended.leased)} prompts were taken from the data; ${number(ended.in_flight)} of them are still under way.`,
    ),
    el(
      "div",
      { class: "card" },
      table(
        ["ended", "meaning", "prompts", "sampled tokens", "share of tokens"],
        ended.rows.map((row) => [row.reason, row.meaning, row.groups, row.tokens, percent(row.tokens, tokens)]),
      ),
    ),
  ];
  const lost = Object.entries(ended.lost_attempts);
  if (lost.length)
    parts.push(
      el("h2", {}, "Attempts left out of groups that were trained on"),
      el("div", { class: "card" }, table(["reason", "attempts"], lost)),
    );
  return [...parts, ...cards];
}

function configurationTab() {
  const runs = state.data.runs;
  const run = chosenRun();
  const filter = el("input", {
    id: "search",
    type: "search",
    placeholder: "Find a setting ( / )",
    "aria-label": "Find a setting",
  });
  const holder = el("div", { class: "card" });
  const compared = runs.length > 1 ? runs : [run];
  const differing = new Set(
    compared.length > 1 ? differingKeys(compared) : run.overrides.map((each) => each.replace(/^\++/, "").split("=")[0]),
  );
  function show() {
    const wanted = filter.value.toLowerCase();
    const keys = [...new Set(compared.flatMap((each) => Object.keys(each.settings)))]
      .filter(
        (key) =>
          key.toLowerCase().includes(wanted) ||
          compared.some((each) => value(each.settings[key]).toLowerCase().includes(wanted)),
      )
      .sort((one, two) => Number(differing.has(two)) - Number(differing.has(one)));
    holder.replaceChildren(
      table(
        ["setting", ...compared.map((each) => each.label)],
        keys.map((key) => [
          el("code", { class: differing.has(key) ? "differs" : null }, key),
          ...compared.map((each) => el("code", {}, value(each.settings[key]))),
        ]),
      ),
    );
  }
  filter.addEventListener("input", show);
  show();
  const changed = run.overrides.length
    ? el(
        "div",
        { class: "card" },
        run.overrides.map((each) => el("div", { class: "code differs" }, each)),
      )
    : el("p", { class: "quiet" }, "The command set nothing beyond the recipe, or it is not known.");
  return [
    el("h2", {}, `What the command changed in the recipe ${run.name}`),
    changed,
    el(
      "h2",
      {},
      compared.length > 1 ? "All settings, those that differ first" : "All settings, the changed ones first",
    ),
    el("div", { class: "row" }, filter),
    holder,
  ];
}

// The first of some names, and how many more there are.
function few(names) {
  const shown = names.slice(0, 3).join(", ");
  return names.length > 3 ? `${shown} and ${names.length - 3} more` : shown;
}

function warningsTab() {
  const { warnings } = chosenRun();
  if (!warnings.length) return [el("p", { class: "lead" }, "There were no warnings."), ended(chosenRun())];
  return [
    ended(chosenRun()),
    el(
      "div",
      { class: "card" },
      table(
        ["warning", "from", "processes", "first step", "last step", "times"],
        warnings.map((each) => [
          each.text,
          el("code", { class: "whole" }, breakable(each.of)),
          few(each.roles),
          each.first,
          each.last,
          each.count,
        ]),
      ),
    ),
  ];
}
