/* The tables: epochs, starts, lineage, settings and environment. */

const ENVIRONMENT = [
  "pipeline", "torch", "numpy", "python", "world_size", "backend", "devices", "threads", "host", "git_commit",
  "git_dirty", "command",
];

function storyName(story) {
  return element("span", { class: "name" }, isOverlay ? swatch(stories.indexOf(story)) : null, story.name);
}

/** Return what is shown of each experiment, below its name if there are several. */
function eachStory(show) {
  return stories.flatMap((story) => {
    const shown = show(story);
    if (!shown) return [];
    return isOverlay ? [element("div", {}, element("h3", {}, storyName(story)), shown)] : [shown];
  });
}

function orNan(value) {
  return value === null ? "nan" : value;
}

function epochTable({ curves, best }) {
  const ofRegister = (name) => ["val", "train"].map((group) => [`${name}, ${group}`, curves[group][name]]);
  const columns = registerNames().flatMap(ofRegister).filter(([, series]) => series?.x.length);
  const epochs = [...new Set(columns.flatMap(([, series]) => series.x))].sort((one, other) => one - other);
  if (!epochs.length) return null;
  const rows = epochs.map((epoch) => {
    const row = [epoch, ...columns.map(([, series]) => valueAt(series, epoch))];
    return withAttributes(row, epoch === best?.epoch ? { class: "best" } : {});
  });
  return folded("Values of every epoch", table(["epoch", ...columns.map(([title]) => title)], rows));
}

function valueAt(series, epoch) {
  const index = series.x.indexOf(epoch);
  return index < 0 ? "" : orNan(series.y[index]);
}

function startTable({ starts }) {
  const rows = starts.map((start) => {
    const words = start.outcome === "unknown" ? "not noted" : start.outcome;
    const ended = element("span", { class: `state ${start.outcome}` }, words);
    const { number, began, reason, seconds, said, changed } = start;
    const times = [ended, reason ?? "", shownDuration(seconds)];
    return [String(number), began, start.from?.words ?? "", ...times, machine(said), changed.join(", ")];
  });
  const head = ["start", "began", "from", "ended", "why", "time", "ran on", "changed"];
  return rows.length ? filledTable(head, rows) : null;
}

function machine({ world_size: count, backend, host }) {
  const processes = count ? `${count} ${count === 1 ? "process" : "processes"}` : "";
  return [processes, backend, host].filter((word) => typeof word === "string" && word && word !== "none").join(", ");
}

function lineageTable() {
  const rows = stories.flatMap((story) => story.lineage).map(({ of, module, experiment, pool, name }) =>
    experiment ? [of, module, `experiment ${experiment}`, pool, name] : [of, module, `file ${name}`, "", ""]);
  const unique = [...new Map(rows.map((row) => [row.join("\n"), row])).values()];
  return rows.length ? filledTable(["experiment", "module", "weights from", "pool", "module there"], unique) : null;
}

/** Return rows with one value per experiment, those that differ apart from those that do not. */
function sideBySide(valuesOf, shown) {
  const names = [...new Set(stories.flatMap((story) => Object.keys(valuesOf(story))))];
  const rows = names.map((name) => [name, ...shown(stories.map((story) => valuesOf(story)[name]))]);
  const differs = ([, ...values]) => new Set(values).size > 1;
  const differing = rows.filter(differs).map((row) => withAttributes(row, { class: "differs" }));
  return { differing, same: rows.filter((row) => !differs(row)) };
}

function storyTable(title, rows) {
  return table([title, ...stories.map((story) => (isOverlay ? storyName(story) : "value"))], rows);
}

function settingsTables() {
  const settings = sideBySide((story) => story.settings, (values) => values.map(shownFact));
  if (!isOverlay) return [storyTable("setting", settings.same)];
  const files = sideBySide(pymodules, letters), title = "pymodule (the same letter: the same file)";
  const none = (what) => element("p", {}, `The ${what} are the same.`);
  return [
    settings.differing.length ? storyTable("setting", settings.differing) : none("settings"),
    files.differing.length ? storyTable(title, files.differing) : none("pymodules"),
    settings.same.length ? folded("Settings that are the same", storyTable("setting", settings.same)) : null,
  ];
}

function pymodules(story) {
  return Object.fromEntries(Object.entries(story.copies).filter(([name]) => name.startsWith("pymodules/")));
}

/** Return a letter for each digest, the same for those that are the same. */
function letters(digests) {
  const known = [...new Set(digests.filter((digest) => digest))];
  return digests.map((digest) => (digest ? String.fromCharCode(65 + (known.indexOf(digest) % 26)) : "–"));
}

function environmentTable() {
  const facts = stories.map((story) => story.starts.at(-1)?.said ?? {});
  const known = ENVIRONMENT.filter((name) => facts.some((said) => (said[name] ?? null) !== null));
  const rows = known.map((name) => [name.replace("_", " "), ...facts.map((said) => shownFact(said[name]))]);
  return rows.length ? storyTable("last start", rows) : null;
}

/** Return a value in one line; equal entries of a list, such as devices, are counted. */
function shownFact(value) {
  if (value === undefined || value === null) return "–";
  if (!Array.isArray(value)) return typeof value === "string" ? value : JSON.stringify(value);
  const texts = value.map((one) => (typeof one === "string" ? one : JSON.stringify(one)));
  const isSame = texts.length > 1 && new Set(texts).size === 1;
  return isSame ? `${texts.length} × ${texts[0]}` : texts.join(" ");
}
