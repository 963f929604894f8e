/* The page, from the top to the bottom. */

const { stories, written, version } = JSON.parse(document.getElementById("stories").textContent);
const isOverlay = stories.length > 1;

function stateBadge({ state }) {
  return element("span", { class: `state ${state}` }, state === "unknown" ? "unfinished" : state);
}

function topOfPage() {
  const title = isOverlay ? [`${stories.length} experiments`] : [stories[0].name, stateBadge(stories[0])];
  const line = `written ${written} by training pipeline ${version}`;
  return element("header", {}, element("h1", {}, ...title), element("p", { class: "note" }, line));
}

function failureBox(story) {
  const title = (words) => element("h3", {}, isOverlay ? `${story.name}: ${words}` : words);
  const resume = element("code", {}, "--resume");
  const hint = element("p", {}, "Everything up to the last commit is kept; ", resume, " continues from there.");
  if (story.state === "killed") {
    return element("div", { class: "box" }, title("The last run was killed: it noted no end."), hint);
  }
  if (story.state !== "failed") return null;
  const errors = story.errors.flatMap(({ rank, error }) => [
    element("p", { class: "note" }, `process ${rank}`), element("pre", {}, error),
  ]);
  return element("div", { class: "box failure" }, title("The last run failed."), ...errors, hint);
}

function totalSeconds({ starts }) {
  const known = starts.map((start) => start.seconds).filter((seconds) => seconds !== null);
  return known.length ? known.reduce((sum, seconds) => sum + seconds, 0) : null;
}

function facts(story) {
  const found = [
    story.state === "finished" ? ["epochs", story.place?.epoch] : ["committed", story.place?.words],
    ["best epoch", story.best?.epoch],
    ["time in runs", shownDuration(totalSeconds(story))],
    ["starts", story.starts.length],
    ["skipped steps", story.skipped.count],
    ...(story.now ? liveFacts(story.now) : []),
  ];
  const shown = found.filter(([, value]) => value !== undefined && value !== null && value !== "");
  const entries = shown.map(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]);
  return element("dl", { class: "facts" }, ...entries.map((entry) => element("div", {}, ...entry)));
}

function liveFacts({ at, eta, owner }) {
  const process = owner.pid ? `pid ${owner.pid} on ${owner.host}` : null;
  return [["now at", at?.words], ["time left", eta === null ? null : shownDuration(eta)], ["run by", process]];
}

/** Return the values of the best and the last evaluation, one row per register. */
function valuesTable({ curves, registers, best }) {
  const last = (series) => (series?.y.length ? orNan(series.y.at(-1)) : "");
  const names = registerNames().filter((name) => curves.val[name] || curves.train[name]);
  const rows = names.map((name) => {
    const { direction = "min", optimize = true } = registers.find((one) => one.name === name) ?? {};
    const wanted = optimize ? direction : `${direction}, not optimised`;
    return [name, orNan(best?.values?.[name]), last(curves.val[name]), last(curves.train[name]), wanted];
  });
  return rows.length ? table(["register", "val, best epoch", "val, last", "train, last epoch", "wanted"], rows) : null;
}

function comparison() {
  const names = registerNames();
  const rows = stories.map((story) => {
    const place = [storyName(story), stateBadge(story), story.place?.words ?? "", orNan(story.best?.epoch)];
    const values = names.map((name) => orNan(story.best?.values?.[name]));
    return [...place, ...values, shownDuration(totalSeconds(story)), story.starts.length, story.skipped.count];
  });
  const head = ["experiment", "state", "committed", "best epoch", ...names, "time", "starts", "skipped"];
  const note = element("p", { class: "note" }, "Values are those of the validation at the best epoch.");
  return element("div", {}, table(head, rows), note);
}

function show() {
  const parts = [
    topOfPage(),
    ...stories.map(failureBox),
    isOverlay ? section("Experiments", comparison()) : section("Summary", facts(stories[0]), valuesTable(stories[0])),
    chartSection(),
    section("Epochs", ...eachStory(epochTable)),
    section("Starts", ...eachStory(startTable)),
    section("Lineage", lineageTable()),
    section(isOverlay ? "What differs" : "Settings", ...settingsTables()),
    section("Environment", environmentTable()),
  ];
  document.getElementById("report").append(...parts.filter((part) => part !== null));
}

show();
