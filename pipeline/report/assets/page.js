/* The page: what a story says, from the top to the bottom. */

const { stories, written, version } = JSON.parse(document.getElementById("stories").textContent);
const isOverlay = stories.length > 1;
const STATE_WORDS = {
  finished: "finished", running: "running", stopped: "stopped", failed: "failed", killed: "killed", unknown: "unfinished",
};

function section(title, ...children) {
  const shown = children.filter((child) => child !== null);
  return shown.length ? element("section", {}, element("h2", {}, title), ...shown) : null;
}

/** Return a table that scrolls by itself if it is too wide; cells are texts, elements or numbers. */
function table(head, rows, attributes = {}) {
  const cell = (tag, value) => {
    const isNumber = typeof value === "number";
    return element(tag, isNumber ? { class: "number" } : {}, isNumber ? shownNumber(value) : value ?? "");
  };
  const body = element("tbody", {}, ...rows.map((row) => element("tr", row.attributes ?? {}, ...row.map((one) => cell("td", one)))));
  const top = element("thead", {}, element("tr", {}, ...head.map((one) => cell("th", one))));
  return element("div", { class: "scroll" }, element("table", attributes, top, body));
}

/** Return a table without the columns that say nothing. */
function filledTable(head, rows) {
  const isFilled = (_, place) => rows.some((row) => row[place] !== "");
  return table(head.filter(isFilled), rows.map((row) => row.filter(isFilled)));
}

function withAttributes(row, attributes) {
  return Object.assign(row, { attributes });
}

function stateBadge(story) {
  return element("span", { class: `state ${story.state}` }, STATE_WORDS[story.state] ?? story.state);
}

function storyName(story) {
  if (!isOverlay) return element("span", {}, story.name);
  return element("span", { class: "name" }, swatch(stories.indexOf(story)), story.name);
}

function swatch(index) {
  return lineSample({ colour: index % 8, dash: 0, look: "bold" });
}

function totalSeconds(story) {
  const known = story.starts.map((start) => start.seconds).filter((seconds) => seconds !== null);
  return known.length ? known.reduce((sum, seconds) => sum + seconds, 0) : null;
}

function lastValue(series) {
  return series && series.y.length ? series.y.at(-1) : undefined;
}

/* ---- the top ---- */

function topOfPage() {
  const line = `written ${written} by training pipeline ${version}`;
  const title = isOverlay ? `${stories.length} experiments` : stories[0].name;
  const head = element("h1", {}, title, ...(isOverlay ? [] : [stateBadge(stories[0])]));
  return element("header", {}, head, element("p", { class: "note" }, line));
}

function facts(story) {
  const found = [
    story.state === "finished" ? ["epochs", story.place?.epoch] : ["committed", story.place?.words],
    ["best epoch", story.best?.epoch], ["time in runs", shownDuration(totalSeconds(story))],
    ["starts", story.starts.length], ["skipped steps", story.skipped.count],
  ];
  if (story.now) found.push(...liveFacts(story.now));
  const shown = found.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return element("dl", { class: "facts" }, ...shown.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
}

function liveFacts(now) {
  const owner = now.owner.pid ? `pid ${now.owner.pid} on ${now.owner.host}` : null;
  return [["now at", now.at?.words], ["time left", now.eta ? shownDuration(now.eta) : null], ["run by", owner]];
}

/** Return the values of the best and the last evaluation, one row per register. */
function valuesTable(story) {
  const names = registerNames().filter((name) => story.curves.val[name] || story.curves.train[name]);
  const rows = names.map((name) => {
    const register = story.registers.find((one) => one.name === name) ?? {};
    const role = `${register.direction ?? "min"}${register.optimize === false ? ", not optimised" : ""}`;
    return [name, orNan(story.best?.values?.[name]), orNan(lastValue(story.curves.val[name])), orNan(lastValue(story.curves.train[name])), role];
  });
  return rows.length ? table(["register", "val, best epoch", "val, last", "train, last epoch", "wanted"], rows) : null;
}

function orNan(value) {
  return value === null ? "nan" : value;
}

function comparison() {
  const names = registerNames();
  const rows = stories.map((story) => [storyName(story), stateBadge(story), story.place?.words ?? "", orNan(story.best?.epoch),
    ...names.map((name) => orNan(story.best?.values?.[name])), shownDuration(totalSeconds(story)), story.starts.length, story.skipped.count]);
  const head = ["experiment", "state", "committed", "best epoch", ...names, "time", "starts", "skipped"];
  return element("div", {}, table(head, rows), element("p", { class: "note" }, "Values are those of the validation at the best epoch."));
}

function failureBox(story) {
  if (story.state === "killed") {
    return element("div", { class: "box" }, storyTitle(story, "The last run was killed: it noted no end."), resumeHint());
  }
  if (story.state !== "failed") return null;
  const parts = story.errors.map(({ rank, error }) => [element("p", { class: "note" }, `process ${rank}`), element("pre", {}, error)]);
  return element("div", { class: "box failure" }, storyTitle(story, "The last run failed."), ...parts.flat(), resumeHint());
}

function storyTitle(story, words) {
  return element("h3", {}, isOverlay ? `${story.name}: ${words}` : words);
}

function resumeHint() {
  return element("p", {}, "Everything up to the last commit is kept; ", element("code", {}, "--resume"), " continues from there.");
}

/* ---- the charts ---- */

function registerNames() {
  const named = stories.flatMap((story) => story.registers.map((register) => register.name));
  const recorded = stories.flatMap((story) => [...Object.keys(story.curves.val), ...Object.keys(story.curves.train)]);
  return [...new Set([...named, ...recorded])];
}

/** Return one curve; alone, kinds differ by colour, and of several experiments, each has its colour. */
function curveOf(index, kind, series, place, look = "bold") {
  const label = isOverlay ? `${stories[index].name} · ${kind}` : kind;
  const colour = isOverlay ? index % 8 : place % 8;
  const dash = (isOverlay ? place : Math.floor(place / 8)) + Math.floor(isOverlay ? index / 8 : 0);
  return { kind, story: index, x: series.x, y: series.y, colour, dash: dash % 5, look, label };
}

function registerChart(name) {
  const curves = [], kinds = [["val", "val", 1, "bold"], ["train", "train", 0, "bold"], ["steps", "train steps", 0, "fine"]];
  stories.forEach((story, index) => {
    for (const [group, kind, place, look] of kinds) {
      const series = story.curves[group][name];
      if (series?.x.length) curves.push(curveOf(index, kind, series, isOverlay ? 1 - place : place, look));
    }
  });
  curves.sort((one, other) => kinds.findIndex((kind) => kind[1] === one.kind) - kinds.findIndex((kind) => kind[1] === other.kind));
  const register = stories.flatMap((story) => story.registers).find((one) => one.name === name);
  const note = register?.direction === "max" ? "more is better" : "";
  return curves.length ? new Chart({ title: name, note, curves, marks: marksOf(name), hidden: isOverlay ? ["train steps"] : [] }) : null;
}

function marksOf(register = null) {
  return stories.flatMap((story, index) => {
    const base = { story: index, colour: isOverlay ? index % 8 : "plain" };
    const best = story.best ? [{ ...base, kind: "best", x: story.best.epoch, y: story.best.values?.[register] ?? null, of: "val", colour: isOverlay ? index % 8 : 1 }] : [];
    const resumed = story.starts.slice(1).map((start) => ({ ...base, kind: "resumed", x: start.epoch, text: startWords(story, start) }));
    const skipped = story.skipped.epochs.map((epoch) => ({ ...base, kind: "skipped", x: epoch, text: "skipped step" }));
    return [...best, ...resumed, ...skipped];
  });
}

function startWords(story, start) {
  const before = story.starts[start.number - 2]?.outcome;
  return `${isOverlay ? `${story.name}: ` : ""}start ${start.number}, the one before ${before === "unknown" ? "ended" : `was ${before}`}`;
}

/** Return a chart of a group of series that have names of their own. */
function groupChart(title, group, { note = "", unit = "", look = "bold", marks = [], dashed = false } = {}) {
  const kinds = [...new Set(stories.flatMap((story) => Object.keys(story.curves[group])))];
  const curves = kinds.flatMap((kind, place) => stories.flatMap((story, index) => {
    const series = story.curves[group][kind];
    const curve = curveOf(index, kind, series ?? { x: [], y: [] }, place, look);
    // Values that are often equal would hide each other: dashes let the one below be seen.
    return curve.x.length ? [dashed ? { ...curve, dash: place % 5 } : curve] : [];
  }));
  return curves.length ? new Chart({ title, note, unit, curves, marks }) : null;
}

function charts() {
  const plain = marksOf().filter((mark) => mark.kind !== "best");
  const found = [
    ...registerNames().map(registerChart),
    groupChart("learning rates", "rates", { marks: plain.filter((mark) => mark.kind === "resumed"), dashed: true }),
    groupChart("gradient norms", "grad_norms", { note: "before clipping", marks: plain, look: "thin" }),
    groupChart("loss weights", "loss_weights", { dashed: true }),
    groupChart("time per epoch", "times", { note: "seconds", unit: " s" }),
    groupChart("memory", "memory", { note: "MB, highest so far on rank 0", unit: " MB" }),
  ].filter(Boolean);
  const epochs = found.flatMap((chart) => chart.curves.flatMap((curve) => [curve.x[0], curve.x.at(-1)]));
  shared.range = [Math.min(0, ...epochs), Math.max(1, ...epochs)];
  const grid = element("div", { class: "charts" }, ...found.map((chart) => chart.node));
  return found.length ? section("Curves over epochs", toolbar(), grid) : null;
}

/** Return the switches that act on all charts: experiments, and the way out of a zoom. */
function toolbar() {
  const bar = element("div", { class: "toolbar" });
  if (isOverlay) stories.forEach((story, index) => bar.append(storySwitch(story, index)));
  const out = element("button", { type: "button", class: "out" }, "show all epochs");
  out.addEventListener("click", () => zoomTo(null));
  bar.append(out, element("span", { class: "note hint" }, "Drag to zoom, double-click to zoom out."));
  return bar;
}

function storySwitch(story, index) {
  const button = element("button", { type: "button", class: "key", "aria-pressed": "true" }, swatch(index), story.name);
  button.addEventListener("click", () => {
    const hidden = shared.hiddenStories;
    hidden.has(index) ? hidden.delete(index) : hidden.add(index);
    button.setAttribute("aria-pressed", String(!hidden.has(index)));
    redrawAll();
  });
  return button;
}

/* ---- the tables ---- */

function epochTable(story) {
  const columns = registerNames().flatMap((name) => ["val", "train"].map((group) => ({ title: `${name}, ${group}`, series: story.curves[group][name] })));
  const known = columns.filter((column) => column.series?.x.length);
  const epochs = [...new Set(known.flatMap((column) => column.series.x))].sort((one, other) => one - other);
  const rows = epochs.map((epoch) => withAttributes(
    [epoch, ...known.map(({ series }) => valueAt(series, epoch))], epoch === story.best?.epoch ? { class: "best" } : {}));
  if (!rows.length) return null;
  return folded(isOverlay ? story.name : "Values of every epoch", table(["epoch", ...known.map((column) => column.title)], rows));
}

function valueAt(series, epoch) {
  const index = series.x.indexOf(epoch);
  return index < 0 ? "" : orNan(series.y[index]);
}

function folded(title, ...children) {
  return element("details", {}, element("summary", {}, title), ...children);
}

function startTable(story) {
  const rows = story.starts.map((start) => [String(start.number), start.began, start.from?.words ?? "",
    element("span", { class: `state ${start.outcome}` }, start.outcome === "unknown" ? "not noted" : start.outcome),
    start.reason ?? "", shownDuration(start.seconds), machine(start.said), start.changed.join(", ")]);
  return rows.length ? filledTable(["start", "began", "from", "ended", "why", "time", "ran on", "changed"], rows) : null;
}

function machine(said) {
  const processes = said.world_size ? `${said.world_size} ${said.world_size === 1 ? "process" : "processes"}` : "";
  return [processes, said.backend, said.host].filter((word) => typeof word === "string" && word && word !== "none").join(", ");
}

function eachStory(show) {
  return stories.map((story) => {
    const shown = show(story);
    return shown && isOverlay ? element("div", {}, element("h3", {}, storyName(story)), shown) : shown;
  }).filter(Boolean);
}

function lineageTable() {
  const rows = stories.flatMap((story) => story.lineage.map((link) => [link.of, link.module,
    link.experiment ? `experiment ${link.experiment}` : `file ${link.name}`, link.pool, link.experiment ? link.name : ""]));
  const unique = [...new Map(rows.map((row) => [row.join("\n"), row])).values()];
  return rows.length ? table(["experiment", "module", "weights from", "pool", "module there"], unique) : null;
}

/** Return a table with one row per name and one column per experiment; rows that differ come first. */
function sideBySide(title, valuesOf, shown) {
  const names = [...new Set(stories.flatMap((story) => Object.keys(valuesOf(story))))];
  const rows = names.map((name) => {
    const cells = stories.map((story) => shown(valuesOf(story)[name]));
    const differs = new Set(cells).size > 1;
    return withAttributes([name, ...cells], differs ? { class: "differs" } : {});
  });
  const differing = rows.filter((row) => row.attributes.class), same = rows.filter((row) => !row.attributes.class);
  // A name in a head is an element, which stands in one table only.
  const head = () => [title, ...stories.map((story) => (isOverlay ? storyName(story) : "value"))];
  return { differing, same, head };
}

function settingsTables() {
  const { differing, same, head } = sideBySide("setting", (story) => story.settings, shownSetting);
  if (!isOverlay) return [table(head(), same)];
  const files = sideBySide("pymodule", pymodules, (digest) => (digest ? digest.slice(0, 12) : "–"));
  const nothing = element("p", {}, "The settings files are the same.");
  return [differing.length ? table(head(), differing) : nothing,
    files.differing.length ? table(files.head(), files.differing) : element("p", {}, "The pymodules are the same."),
    same.length ? folded("Settings that are the same", table(head(), same)) : null];
}

function pymodules(story) {
  return Object.fromEntries(Object.entries(story.copies).filter(([name]) => name.startsWith("pymodules/")));
}

function shownSetting(value) {
  if (value === undefined) return "–";
  return typeof value === "string" ? value : JSON.stringify(value, null, 1).replace(/\s*\n\s*/g, " ");
}

const ENVIRONMENT = ["pipeline", "torch", "numpy", "python", "world_size", "backend", "devices", "threads", "host", "git_commit", "git_dirty", "command"];

function environmentTable() {
  const said = (story) => story.starts.at(-1)?.said ?? {};
  const rows = ENVIRONMENT.filter((name) => stories.some((story) => said(story)[name] !== undefined && said(story)[name] !== null))
    .map((name) => [name.replace("_", " "), ...stories.map((story) => shownFact(said(story)[name]))]);
  return rows.length ? table(["last start", ...stories.map((story) => (isOverlay ? storyName(story) : "value"))], rows) : null;
}

/** Return a fact in one line; equal entries of a list, such as devices, are counted. */
function shownFact(value) {
  if (!Array.isArray(value)) return shownSetting(value ?? undefined);
  const texts = value.map((one) => (typeof one === "string" ? one : JSON.stringify(one)));
  const isSame = texts.length > 1 && new Set(texts).size === 1;
  return isSame ? `${texts.length} × ${texts[0]}` : texts.join(" ");
}

function show() {
  const parts = [
    topOfPage(), ...stories.map(failureBox),
    isOverlay ? section("Experiments", comparison()) : section("Summary", facts(stories[0]), valuesTable(stories[0])),
    charts(),
    section("Epochs", ...eachStory(epochTable)), section("Starts", ...eachStory(startTable)),
    section("Lineage", lineageTable()), section(isOverlay ? "What differs" : "Settings", ...settingsTables()),
    section("Environment", environmentTable()),
  ];
  document.getElementById("report").append(...parts.filter((part) => part !== null));
}

show();
