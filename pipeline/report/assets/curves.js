/* From stories to charts: one per register, and one for each other group of series. */

const REGISTER_KINDS = [
  { group: "val", kind: "val", place: 1, look: "bold" },
  { group: "train", kind: "train", place: 0, look: "bold" },
  { group: "steps", kind: "train steps", place: 0, look: "fine" },
];

function registerNames() {
  const named = stories.flatMap((story) => story.registers.map((register) => register.name));
  const recorded = stories.flatMap((story) => [...Object.keys(story.curves.val), ...Object.keys(story.curves.train)]);
  return [...new Set([...named, ...recorded])];
}

/** Return the curves of one kind; alone, kinds differ by colour, and of several experiments each has its colour. */
function curvesOf(group, name, { kind = name, place, look }) {
  return stories.flatMap((story, index) => {
    const series = story.curves[group][name];
    if (!series?.x.length) return [];
    const label = isOverlay ? `${story.name} · ${kind}` : kind;
    const colour = (isOverlay ? index : place) % 8;
    const dash = isOverlay ? place + Math.floor(index / 8) : Math.floor(place / 8);
    return [{ kind, story: index, label, x: series.x, y: series.y, colour, dash: dash % DASHES.length, look }];
  });
}

function registerChart(name) {
  // Of several experiments the validation has the solid line.
  const placed = REGISTER_KINDS.map((one) => (isOverlay ? { ...one, place: 1 - one.place } : one));
  const curves = placed.flatMap((one) => curvesOf(one.group, name, one));
  if (!curves.length) return null;
  const register = stories.flatMap((story) => story.registers).find((one) => one.name === name);
  const note = register?.direction === "max" ? "more is better" : "";
  return new Chart({ title: name, note, curves, marks: marksOf(name), hidden: isOverlay ? ["train steps"] : [] });
}

/** Return a chart of a group of series that have names of their own. */
function groupChart(title, group, { note = "", unit = "", look = "bold", marks = [], areDashed = false } = {}) {
  const names = [...new Set(stories.flatMap((story) => Object.keys(story.curves[group])))];
  const curves = names.flatMap((name, place) => {
    const found = curvesOf(group, name, { place, look });
    // Values that are often equal would hide each other: dashes let the one below be seen.
    return areDashed ? found.map((curve) => ({ ...curve, dash: place % DASHES.length })) : found;
  });
  return curves.length ? new Chart({ title, note, unit, curves, marks }) : null;
}

function marksOf(register) {
  return stories.flatMap((story, index) => [
    ...bestMark(story, index, register), ...resumedMarks(story, index), ...skippedMarks(story, index),
  ]);
}

function bestMark({ best }, story, register) {
  const colour = isOverlay ? story % 8 : 1;
  return best ? [{ kind: "best", story, colour, x: best.epoch, y: best.values?.[register], of: "val" }] : [];
}

function resumedMarks({ name, starts }, story) {
  const colour = isOverlay ? story % 8 : "plain";
  return starts.slice(1).map(({ number, epoch }, index) => {
    const before = starts[index].outcome === "unknown" ? "ended" : `was ${starts[index].outcome}`;
    const text = `${isOverlay ? `${name}: ` : ""}start ${number}, the one before ${before}`;
    return { kind: "resumed", story, colour, x: epoch, text };
  });
}

function skippedMarks({ name, skipped }, story) {
  const text = `${isOverlay ? `${name}: ` : ""}skipped step`;
  return skipped.epochs.map((x) => ({ kind: "skipped", story, colour: isOverlay ? story % 8 : "plain", x, text }));
}

function allCharts() {
  const resumed = stories.flatMap((story, index) => resumedMarks(story, index));
  const skipped = stories.flatMap((story, index) => skippedMarks(story, index));
  const norms = { note: "before clipping", look: "thin", marks: [...resumed, ...skipped] };
  return [
    ...registerNames().map(registerChart),
    groupChart("learning rates", "rates", { marks: resumed, areDashed: true }),
    groupChart("gradient norms", "grad_norms", norms),
    groupChart("loss weights", "loss_weights", { areDashed: true }),
    groupChart("time per epoch", "times", { note: "seconds", unit: " s" }),
    groupChart("memory", "memory", { note: "MB, highest so far on rank 0", unit: " MB" }),
  ].filter(Boolean);
}

function chartSection() {
  const charts = allCharts();
  if (!charts.length) return null;
  const ends = charts.flatMap((chart) => chart.curves.flatMap((curve) => [curve.x[0], curve.x.at(-1)]));
  shared.range = [Math.min(0, ...ends), Math.max(1, ...ends)];
  const grid = element("div", { class: "charts" }, ...charts.map((chart) => chart.node));
  return section("Curves over epochs", toolbar(), grid);
}

/** Return the switches that act on all charts: experiments, and the way out of a zoom. */
function toolbar() {
  const out = element("button", { type: "button", class: "out" }, "show all epochs");
  out.addEventListener("click", () => zoomTo(null));
  const hint = element("span", { class: "note hint" }, "Drag to zoom, double-click to zoom out.");
  const switches = isOverlay ? stories.map((story, index) => storySwitch(story, index)) : [];
  return element("div", { class: "toolbar" }, ...switches, out, hint);
}

function storySwitch(story, index) {
  return toggle({ class: "key" }, true, (isOn) => switchStory(index, isOn), swatch(index), story.name);
}

function swatch(index) {
  return lineSample({ colour: index % 8, dash: 0, look: "bold" });
}
