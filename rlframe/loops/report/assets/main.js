// The frame of the page: tabs, theme, keys.

const TABS = {
  Overview: overviewTab,
  Curves: curvesTab,
  Timeline: timelineTab,
  Rollouts: rolloutsTab,
  Data: dataTab,
  Configuration: configurationTab,
  Warnings: warningsTab,
};
const KEYS = [
  ["1 - 7", "parts of the report"],
  ["/", "search"],
  ["j, k", "next and previous rollout"],
  ["left, right", "previous and next token"],
  ["c", "colour tokens by something else"],
  ["d", "light or dark"],
  ["?", "these keys"],
];

function show(tab) {
  state.tab = TABS[tab] ? tab : "Overview";
  const main = document.getElementById("main");
  view.move = view.mark = null;
  main.replaceChildren(...TABS[state.tab]().filter(Boolean));
  for (const button of document.querySelectorAll("#tabs button"))
    button.setAttribute("aria-current", button.dataset.tab === state.tab ? "page" : "false");
  document.getElementById("run").hidden = state.data.runs.length < 2 || ["Overview", "Curves"].includes(state.tab);
  if (location.hash.slice(1) !== state.tab) history.replaceState(null, "", `#${state.tab}`);
  window.scrollTo(0, 0);
}

function setTheme(theme) {
  state.theme = theme;
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
  recolour();
}

function nextColouring() {
  const choice = document.getElementById("colouring");
  if (!choice) return;
  const usable = [...choice.options].filter((option) => !option.disabled).map((option) => option.value);
  choice.value = usable[(usable.indexOf(choice.value) + 1) % usable.length];
  choice.dispatchEvent(new Event("change"));
}

function onKey(event) {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const help = document.getElementById("help");
  if (help.open) return;
  const names = Object.keys(TABS);
  const actions = {
    "/": () => document.getElementById("search")?.focus(),
    j: () => view.move?.(1),
    k: () => view.move?.(-1),
    ArrowRight: () => view.mark?.(1),
    ArrowLeft: () => view.mark?.(-1),
    c: nextColouring,
    d: () => setTheme(state.theme === "dark" ? "light" : "dark"),
    "?": () => help.showModal(),
  };
  const act = actions[event.key] || (names[Number(event.key) - 1] ? () => show(names[Number(event.key) - 1]) : null);
  if (act) {
    event.preventDefault();
    act();
  }
}

// Runs of one recipe have one name; their folders tell them apart.
function label(runs) {
  for (const run of runs)
    run.label =
      runs.length > 1 && runs.some((other) => other !== run && other.name === run.name)
        ? run.output.split("/").slice(-2).join("/")
        : run.name;
}

function frame() {
  const { runs, made_at: made } = state.data;
  label(runs);
  const [first] = runs;
  document.getElementById("name").textContent = runs.length > 1 ? `${runs.length} runs` : first.name;
  document.title = `${document.getElementById("name").textContent} - rlframe report`;
  const when = new Date(1000 * made).toISOString().slice(0, 16).replace("T", " ");
  document.getElementById("state").textContent =
    (runs.length > 1 ? "" : `step ${first.done} of ${first.steps}, `) + `written ${when} UTC`;
  document
    .getElementById("tabs")
    .append(
      ...Object.keys(TABS).map((name) =>
        el("button", { "data-tab": name, onclick: () => show(name) }, name),
      ),
    );
  const picker = document.getElementById("run");
  picker.append(...runs.map((run, place) => el("option", { value: place }, run.label)));
  picker.addEventListener("change", () => {
    state.run = Number(picker.value);
    show(state.tab);
  });
  const help = document.getElementById("help");
  help.append(
    el("h2", {}, "Keys"),
    el(
      "table",
      {},
      KEYS.map(([key, what]) => el("tr", {}, el("td", {}, el("kbd", {}, key)), el("td", {}, what))),
    ),
    el("p", {}, el("button", { onclick: () => help.close() }, "Close")),
  );
  document.getElementById("keys").addEventListener("click", () => help.showModal());
  document.getElementById("theme").addEventListener("click", () => setTheme(state.theme === "dark" ? "light" : "dark"));
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", () => show(location.hash.slice(1)));
}

async function begin() {
  if (typeof DecompressionStream === "undefined") {
    document.getElementById("name").textContent =
      "This browser is too old for this page: it cannot unpack what is in it.";
    return;
  }
  const wanted = new URLSearchParams(location.search).get("theme");
  setTheme(wanted || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  const [library, content] = await Promise.all([unpacked("library"), unpacked("content")]);
  const script = el("script");
  script.textContent = library;
  document.head.append(script);
  state.data = JSON.parse(content);
  frame();
  show(location.hash.slice(1));
}

begin();
