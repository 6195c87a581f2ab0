// The tokens of a rollout, coloured by one of their numbers.

const COLOURINGS = {
  mask: {
    title: "who wrote it",
    legend: [
      ["policy, in the loss", "rgb(var(--blue) / .32)"],
      ["policy, not in the loss", "rgb(var(--orange) / .38)"],
      ["given", "transparent"],
    ],
  },
  logprob: {
    title: "log-probability (engine)",
    legend: [
      ["certain", "transparent"],
      ["2.5 nats", "rgba(204,121,167,.35)"],
      ["5 nats or more: a surprise", "rgba(204,121,167,.7)"],
    ],
  },
  gap: {
    title: "gap between trainer and engine",
    needs: "trainer_logprobs",
    legend: [
      ["trainer likelier", "rgba(0,114,178,.6)"],
      ["equal", "transparent"],
      ["engine likelier", "rgba(213,94,0,.6)"],
    ],
  },
  advantage: {
    title: "advantage",
    needs: "advantages",
    legend: [
      ["made less likely", "rgba(213,94,0,.6)"],
      ["none", "transparent"],
      ["made more likely", "rgba(0,114,178,.6)"],
    ],
  },
  version: { title: "version of the weights", legend: [] },
};

// Null where there is none, or a number is not finite, which files have as null.
function gapOf(tokens, place) {
  if (!tokens.sampled[place]) return null;
  const [trainer, engine] = [tokens.trainer_logprobs?.[place] ?? null, tokens.rollout_logprobs[place]];
  return trainer === null || engine === null ? null : trainer - engine;
}

function greatest(values) {
  return values.reduce((most, value) => Math.max(most, Math.abs(value || 0)), 0);
}

function diverging(value, most, low, high) {
  if (!value || !most) return "transparent";
  return `rgba(${value < 0 ? low : high},${(0.12 + 0.6 * Math.min(1, Math.abs(value) / most)).toFixed(3)})`;
}

// Returns the colour of each token.
function tokenColours(tokens, by) {
  const places = tokens.ids.map((_, place) => place);
  const [low, high] = ["213,94,0", "0,114,178"];
  if (by === "mask") {
    const inLoss = tokens.in_loss || tokens.sampled;
    return places.map((place) => COLOURINGS.mask.legend[inLoss[place] ? 0 : tokens.sampled[place] ? 1 : 2][1]);
  }
  if (by === "logprob")
    return places.map((place) =>
      diverging(tokens.sampled[place] ? tokens.rollout_logprobs[place] : 0, 5, "204,121,167", "204,121,167"),
    );
  if (by === "gap") {
    const gaps = places.map((place) => gapOf(tokens, place));
    const most = Math.max(0.01, greatest(gaps));
    return gaps.map((gap) => diverging(gap, most, low, high));
  }
  if (by === "advantage") {
    const most = greatest(tokens.advantages || []);
    return places.map((place) => diverging((tokens.advantages || [])[place], most, low, high));
  }
  const versions = [...new Set(tokens.versions.filter((version) => version >= 0))];
  return places.map((place) =>
    tokens.versions[place] < 0
      ? "transparent"
      : PALETTE[versions.indexOf(tokens.versions[place]) % PALETTE.length] + "66",
  );
}

function tokenLegend(tokens, by) {
  const versions = [...new Set(tokens.versions.filter((version) => version >= 0))];
  const rows =
    by === "version"
      ? versions.map((version, place) => [`version ${version}`, PALETTE[place % PALETTE.length] + "66"])
      : COLOURINGS[by].legend;
  return el(
    "div",
    { class: "legend" },
    rows.map(([text, colour]) => el("span", {}, el("span", { class: "swatch", style: `background:${colour}` }), text)),
  );
}

// A line break ends a token's text and its line.
function visible(piece) {
  if (piece === "") return "\u00b7";
  return piece.replaceAll("\n", "\u21b5\n").replaceAll("\t", "\u2192\t");
}

function factsOf(tokens, place) {
  const fact = (name, value) => (value === null || value === undefined ? null : `${name} ${number(value, 5)}`);
  const sampled = tokens.sampled[place];
  return [
    `token ${place}: ${JSON.stringify(tokens.pieces[place])}`,
    `id ${tokens.ids[place]}`,
    sampled ? fact("turn", tokens.turns[place] + 1) : "given, not sampled",
    sampled ? fact("engine logprob", tokens.rollout_logprobs[place]) : null,
    sampled && tokens.trainer_logprobs ? fact("trainer logprob", tokens.trainer_logprobs[place]) : null,
    fact("gap", gapOf(tokens, place)),
    sampled && tokens.advantages ? fact("advantage", tokens.advantages[place]) : null,
    sampled ? fact("version", tokens.versions[place]) : null,
    tokens.rewards && tokens.rewards[place] ? fact("reward here", tokens.rewards[place]) : null,
    tokens.in_loss && sampled && !tokens.in_loss[place] ? "not in the loss" : null,
  ]
    .filter(Boolean)
    .join("  |  ");
}

// Stretches of tokens: the prompt, then turns of the policy and what the environment answers.
function turnsOf(tokens) {
  const found = [];
  tokens.ids.forEach((_, place) => {
    const kind = tokens.sampled[place];
    const last = found[found.length - 1];
    if (last && last.kind === kind) last.places.push(place);
    else found.push({ kind, places: [place], turn: tokens.turns[place] });
  });
  return found;
}

// Returns the places of tokens that have a part of the text, which may reach over several of them.
function placesOf(tokens, search) {
  const found = new Set();
  if (!search) return found;
  const pieces = tokens.pieces.map((piece) => piece.toLowerCase());
  const text = pieces.join("");
  let place = 0;
  let start = 0;
  for (let at = text.indexOf(search); at >= 0; at = text.indexOf(search, at + search.length)) {
    while (start + pieces[place].length <= at) start += pieces[place++].length;
    for (let next = place, reach = start; reach < at + search.length; reach += pieces[next++].length) found.add(next);
  }
  return found;
}

function tokenView(tokens, by, search, onChoose) {
  const found = tokenColours(tokens, by);
  const hits = placesOf(tokens, search);
  return turnsOf(tokens).map(({ kind, places, turn }, index) =>
    el(
      "div",
      { class: kind ? "turn policy" : "turn" },
      el(
        "div",
        { class: "quiet" },
        `${kind ? `policy, turn ${turn + 1}` : index ? "environment" : "prompt"}, ${places.length} tokens`,
      ),
      el(
        "div",
        { class: "tokens" },
        places.map((place) => {
          const mouse = () => onChoose(place, false);
          return el(
            "span",
            {
              style: `background:${found[place]}`,
              "data-place": place,
              class: hits.has(place) ? "found" : null,
              onmouseover: mouse,
            },
            visible(tokens.pieces[place]),
          );
        }),
      ),
    ),
  );
}
