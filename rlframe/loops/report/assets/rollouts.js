// Rollouts: a list to search and sort, and one of them with its tokens, its rewards and its group.

const view = { order: "best first", step: "all", search: "", by: "mask", place: 0, token: -1 };
const ORDERS = {
  "best first": (one, two) => (two.reward ?? -1e9) - (one.reward ?? -1e9) || advantageOf(two) - advantageOf(one),
  "worst first": (one, two) => (one.reward ?? 1e9) - (two.reward ?? 1e9) || advantageOf(one) - advantageOf(two),
  "newest first": (one, two) => two.step - one.step,
  "oldest first": (one, two) => one.step - two.step,
  "greatest gap first": (one, two) => meanGap(two) - meanGap(one),
  "longest first": (one, two) => two.tokens.ids.length - one.tokens.ids.length,
};

const ENDS = {
  stop: "the policy ended it",
  length: "cut off: no tokens or turns were left",
  abort: "aborted",
};

function advantageOf(rollout) {
  return rollout.group_advantages ? rollout.group_advantages[rollout.group_place] : 0;
}

function meanGap({ tokens }) {
  const gaps = tokens.ids.map((_, place) => gapOf(tokens, place)).filter((gap) => gap !== null);
  return gaps.length ? gaps.reduce((sum, gap) => sum + Math.abs(gap), 0) / gaps.length : -1;
}

function matching(run) {
  const search = view.search.toLowerCase();
  const text = (each) =>
    `${each.id} ${each.prompt} ${each.response} ${each.tokens.pieces.join("")} ${each.answer ?? ""}`.toLowerCase();
  return run.attempts
    .filter(
      (each) => (view.step === "all" || String(each.step) === view.step) && (!search || text(each).includes(search)),
    )
    .sort(ORDERS[view.order]);
}

function group(run, rollout, open) {
  if (!rollout.group_rewards) return null;
  const kept = (place) =>
    run.attempts.find(
      (each) => each.step === rollout.step && each.group === rollout.group && each.group_place === place,
    );
  const sequences = rollout.group_rewards.length;
  // Files of before the number of attempts have none.
  const attempts = rollout.group_attempts ?? sequences;
  const parts = attempts < sequences ? `, which are ${sequences} sequences` : "";
  return [
    el("h3", {}, `Group: ${attempts} attempts at this prompt${parts}`),
    el("p", { class: "quiet" }, "Reward, and below it the mean advantage. Attempts that are kept can be opened."),
    el(
      "div",
      { class: "members" },
      rollout.group_rewards.map((reward, place) => {
        const advantage = rollout.group_advantages[place];
        const other = kept(place);
        const colour = diverging(advantage, greatest(rollout.group_advantages), "213,94,0", "0,114,178");
        return el(
          "button",
          {
            class: place === rollout.group_place ? "member here" : "member",
            disabled: !other,
            style: `background:${colour}`,
            onclick: () => open(other),
          },
          number(reward, 3),
          el("br"),
          el("span", { class: "quiet" }, number(advantage, 3)),
        );
      }),
    ),
  ];
}

function rewardTable(rollout) {
  const names = Object.keys(rollout.reward_parts);
  if (!names.length) return null;
  const troubled = Object.values(rollout.reward_troubles).some(Boolean);
  return table(
    ["reward", "value", "weight", ...(troubled ? ["trouble"] : [])],
    names.map((name) => [
      name,
      rollout.reward_parts[name],
      rollout.reward_weights[name] ?? 1,
      ...(troubled ? [rollout.reward_troubles[name] || ""] : []),
    ]),
  );
}

function detail(run, rollout, open) {
  const facts = el("div", { class: "facts" }, "Point at a token, or press the left and right arrow keys.");
  const body = el("div");
  const legend = el("div");
  const choice = el(
    "select",
    { id: "colouring", "aria-label": "Colour tokens by" },
    Object.entries(COLOURINGS).map(([name, { title, needs }]) =>
      el(
        "option",
        { value: name, selected: name === view.by, disabled: Boolean(needs && !rollout.tokens[needs]) },
        title,
      ),
    ),
  );
  function mark(place, scroll) {
    view.token = place;
    body.querySelector(".chosen")?.classList.remove("chosen");
    const token = body.querySelector(`[data-place="${place}"]`);
    token?.classList.add("chosen");
    if (scroll) token?.scrollIntoView({ block: "nearest" });
    facts.textContent = factsOf(rollout.tokens, place);
  }
  function draw() {
    const { needs } = COLOURINGS[view.by];
    const by = needs && !rollout.tokens[needs] ? "mask" : view.by;
    choice.value = by;
    legend.replaceChildren(tokenLegend(rollout.tokens, by));
    body.replaceChildren(...tokenView(rollout.tokens, by, view.search.toLowerCase(), mark));
  }
  choice.addEventListener("change", () => {
    view.by = choice.value;
    draw();
  });
  draw();
  view.mark = (move) => mark(Math.min(Math.max(view.token + move, 0), rollout.tokens.ids.length - 1), true);
  view.token = -1;
  const missing =
    rollout.tokens.trainer_logprobs || rollout.evaluation
      ? null
      : el("span", { class: "quiet" }, "The gap is not known here: logging.samples.trainer_logprobs=true records it.");
  return el(
    "section",
    { class: "card" },
    el(
      "h3",
      {},
      `${rollout.evaluation ? `Evaluation ${rollout.evaluation} at step` : "Step"} ${rollout.step}, ${rollout.id}`,
    ),
    el(
      "p",
      { class: "quiet" },
      [
        `attempt ${rollout.sample_index}`,
        rollout.sequence ? `sequence ${rollout.sequence}` : null,
        ENDS[rollout.finish_reason] || `ended: ${rollout.finish_reason}`,
        rollout.ending === "done" ? null : rollout.ending || null,
        rollout.answer === null ? null : `right answer: ${rollout.answer}`,
        `kept as: ${rollout.kept_as.join(", ")}`,
      ]
        .filter(Boolean)
        .join("  |  "),
    ),
    el("p", {}, "Reward ", el("span", { class: "reward" }, number(rollout.reward))),
    rewardTable(rollout),
    group(run, rollout, open),
    el("h2", {}, "Tokens"),
    el("div", { class: "row" }, el("label", {}, "Colour: ", choice), missing),
    legend,
    body,
    facts,
  );
}

// Whether a step may have kept more attempts than the page has of it.
function isFull(run) {
  const counts = new Map();
  for (const { step, evaluation } of run.attempts)
    counts.set(`${step} ${evaluation}`, (counts.get(`${step} ${evaluation}`) || 0) + 1);
  return [...counts.values()].some((count) => count >= run.most_attempts);
}

function rolloutsTab() {
  const run = chosenRun();
  if (!run.attempts.length)
    return [
      el("p", {}, "No rollouts are kept token by token: logging.samples.keep is empty, or this run does not sample."),
    ];
  const steps = ["all", ...new Set(run.attempts.map((each) => String(each.step)))];
  if (!steps.includes(view.step)) view.step = "all";
  const list = el("div", { class: "card list" });
  const side = el("div");
  const count = el("span", { class: "quiet" });
  let found = [];
  function open(rollout) {
    view.place = Math.max(0, found.indexOf(rollout));
    side.replaceChildren(rollout ? detail(run, rollout, open) : el("p", {}, "No rollout has this text."));
    for (const [place, item] of [...list.children].entries())
      item.setAttribute("aria-current", String(found[place] === rollout));
    list.children[view.place]?.scrollIntoView({ block: "nearest" });
  }
  function fill() {
    found = matching(run);
    count.textContent =
      `${found.length} of ${run.attempts.length}` +
      (steps.length - 1 < run.sampled_steps
        ? `, of ${steps.length - 1} steps out of ${run.sampled_steps}: python -m rlframe.tools.rollouts has all`
        : isFull(run)
          ? `, at most ${run.most_attempts} of a step: python -m rlframe.tools.rollouts has all`
          : "");
    list.replaceChildren(
      ...found.map((each) =>
        el(
          "button",
          { class: "item", onclick: () => open(each) },
          el("span", { class: "reward" }, number(each.reward, 3)),
          ` ${each.evaluation ? "evaluation at" : "step"} ${each.step}`,
          el("span", { class: "quiet" }, `  ${each.id.slice(0, 40)}`),
          el("span", { class: "text" }, each.response || each.prompt),
        ),
      ),
    );
    open(found[0]);
  }
  const picker = (label, options, key) => {
    const node = el(
      "select",
      { "aria-label": label },
      options.map((name) => el("option", { value: name, selected: name === view[key] }, name)),
    );
    node.addEventListener("change", () => {
      view[key] = node.value;
      fill();
    });
    return el("label", {}, `${label} `, node);
  };
  const search = el("input", {
    id: "search",
    type: "search",
    placeholder: "Find text ( / )",
    "aria-label": "Find text",
    value: view.search,
  });
  search.addEventListener("input", () => {
    view.search = search.value;
    fill();
  });
  view.move = (by) => open(found[Math.min(Math.max(view.place + by, 0), found.length - 1)]);
  fill();
  return [
    el(
      "div",
      { class: "row" },
      search,
      picker("Order", Object.keys(ORDERS), "order"),
      picker("Step", steps, "step"),
      count,
    ),
    el("div", { class: "split" }, list, side),
  ];
}
