/* One chart: curves over epochs that can be hovered, toggled, zoomed and seen on a linear or a logarithmic axis. */

const CHART = { height: 236, top: 10, right: 14, bottom: 26, dashes: ["", "6 3", "2 3", "8 3 2 3", "1 2"] };

/** What all charts of the page share: the shown range of epochs and the experiments that are switched off. */
const shared = { charts: [], range: [0, 1], zoom: null, hiddenStories: new Set() };

function redrawAll() {
  for (const chart of shared.charts) chart.draw();
}

function zoomTo(range) {
  shared.zoom = range;
  document.body.classList.toggle("zoomed", range !== null);
  redrawAll();
}

class Chart {
  /** A curve is {kind, story, x, y, colour, dash, look}; marks are {x, y, kind, story, colour, text}. */
  constructor({ title, note = "", curves, marks = [], hidden = [], unit = "" }) {
    const told = new Set(curves.map((curve) => curve.story));
    this.marks = marks.filter((mark) => told.has(mark.story));
    Object.assign(this, { title, curves, unit, isLog: false, hidden: new Set(hidden), hover: null });
    this.kinds = [...new Set(curves.map((curve) => curve.kind))];
    this.plot = element("div", { class: "plot" });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.node = element("figure", { class: "chart" }, this.header(note), this.legend(), this.plot);
    shared.charts.push(this);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  header(note) {
    const caption = element("figcaption", {}, this.title);
    if (note) caption.append(element("span", { class: "note" }, note));
    const button = element("button", { type: "button", class: "scale", "aria-pressed": "false" }, "log");
    const isPossible = this.curves.some((curve) => curve.y.some((value) => value > 0));
    button.disabled = !isPossible;
    button.title = isPossible ? "logarithmic y axis" : "no positive values";
    button.addEventListener("click", () => {
      this.isLog = !this.isLog;
      button.setAttribute("aria-pressed", String(this.isLog));
      this.draw();
    });
    return element("div", { class: "head" }, caption, button);
  }

  legend() {
    const list = element("div", { class: "legend" });
    for (const kind of this.kinds) list.append(this.legendEntry(kind));
    for (const [kind, words] of Object.entries(MARK_WORDS)) {
      if (!this.marks.some((mark) => mark.kind === kind)) continue;
      list.append(element("span", { class: "key" }, markSample(kind), words));
    }
    return list;
  }

  legendEntry(kind) {
    const curve = this.curves.find((one) => one.kind === kind);
    const isShown = !this.hidden.has(kind);
    const button = element("button", { type: "button", class: "key", "aria-pressed": String(isShown) });
    button.append(lineSample(isOverlay ? { ...curve, colour: "plain" } : curve), kind);
    button.addEventListener("click", () => {
      this.hidden.has(kind) ? this.hidden.delete(kind) : this.hidden.add(kind);
      button.setAttribute("aria-pressed", String(!this.hidden.has(kind)));
      this.draw();
    });
    return button;
  }

  isVisible(one) {
    return !shared.hiddenStories.has(one.story) && !this.hidden.has(one.kind);
  }

  visible() {
    return this.curves.filter((curve) => this.isVisible(curve));
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    this.measure(width);
    const svg = shape("svg", { width, height: CHART.height, role: "img", tabindex: "0", "aria-label": this.title });
    const curves = this.visible().reverse().sort((one, other) => depth(one) - depth(other)).flatMap((curve) => this.drawn(curve));
    svg.append(...this.axes(), ...this.drawnMarks(), ...curves, ...this.drawnRings());
    this.overlay = shape("g");
    svg.append(this.overlay);
    this.plot.replaceChildren(svg, this.tip);
    this.tip.hidden = true;
    this.listen(svg);
  }

  /** Decide both extents, the ticks, and the room their labels need. */
  measure(width) {
    this.range = shared.zoom ?? shared.range;
    this.extent = paddedExtent(this.shownValues(), this.isLog);
    const ticks = this.isLog ? logTicks(this.extent, 5) : linearTicks(this.extent, 5);
    this.yTicks = ticks;
    this.left = 14 + 6.7 * Math.max(2, ...ticks.map((tick) => tick.label.length));
    this.right = width - CHART.right;
    this.base = CHART.height - CHART.bottom;
    this.xTicks = linearTicks(this.range, (this.right - this.left) / 70, shared.zoom ? 0 : 1);
  }

  *shownValues() {
    const [from, to] = this.range;
    for (const { x, y } of this.visible()) {
      for (let index = 0; index < x.length; index++) {
        if (x[index] >= from && x[index] <= to && this.isDrawable(y[index])) yield y[index];
      }
    }
  }

  isDrawable(value) {
    return value !== null && value !== undefined && (!this.isLog || value > 0);
  }

  across(epoch) {
    const [from, to] = this.range;
    return this.left + ((epoch - from) / (to - from)) * (this.right - this.left);
  }

  up(value) {
    const place = (number) => (this.isLog ? Math.log10(number) : number);
    const [low, high] = this.extent.map(place);
    return this.base - ((place(value) - low) / (high - low)) * (this.base - CHART.top);
  }

  axes() {
    const drawn = [];
    for (const { value, label } of this.yTicks) {
      const y = this.up(value).toFixed(1);
      drawn.push(shape("line", { class: "grid", x1: this.left, x2: this.right, y1: y, y2: y }));
      drawn.push(shape("text", { class: "tick", x: this.left - 6, y, dy: "0.33em", "text-anchor": "end" }, label));
    }
    for (const { value, label } of this.xTicks) {
      const x = this.across(value).toFixed(1);
      drawn.push(shape("line", { class: "axis", x1: x, x2: x, y1: this.base, y2: this.base + 4 }));
      drawn.push(shape("text", { class: "tick", x, y: this.base + 17, "text-anchor": "middle" }, label));
    }
    drawn.push(shape("line", { class: "axis", x1: this.left, x2: this.right, y1: this.base, y2: this.base }));
    return drawn;
  }

  /** Return the path of a curve, broken at gaps, and dots where a line has no length or points are few. */
  drawn(curve) {
    const runs = this.runs(curve), look = `curve ${curve.look} colour-${curve.colour}`;
    const path = runs.map((run) => "M" + run.map((point) => point.join(",")).join("L")).join("");
    const line = shape("path", { class: look, d: path, "stroke-dasharray": CHART.dashes[curve.dash] ?? "" });
    const isSparse = curve.look !== "fine" && curve.x.length <= (this.right - this.left) / 12;
    const dotted = isSparse ? runs.flat() : runs.filter((run) => run.length === 1).flat();
    const dots = dotted.map(([cx, cy]) => shape("circle", { class: `dot ${look}`, cx, cy, r: 2 }));
    return path ? [line, ...dots] : [];
  }

  runs({ x, y }) {
    const runs = [[]], [from, to] = this.range, first = firstFrom(x, from) - 1;
    for (let index = Math.max(0, first); index < x.length; index++) {
      if (this.isDrawable(y[index])) runs.at(-1).push([this.across(x[index]).toFixed(1), this.up(y[index]).toFixed(1)]);
      else if (runs.at(-1).length) runs.push([]);
      if (x[index] > to) break;
    }
    return runs.filter((run) => run.length);
  }

  isInside(epoch) {
    return epoch !== null && epoch >= this.range[0] && epoch <= this.range[1];
  }

  shownMarks(kind) {
    return this.marks.filter((mark) => mark.kind === kind && this.isVisible(mark) && this.isInside(mark.x));
  }

  drawnMarks() {
    const lines = (kind) => this.shownMarks(kind).map((mark) => this.upright(mark));
    const ticks = this.shownMarks("skipped").map((mark) => {
      const x = this.across(mark.x).toFixed(1);
      const look = `mark skipped colour-${mark.colour}`;
      return shape("line", { class: look, x1: x, x2: x, y1: CHART.top - 4, y2: CHART.top + 4 });
    });
    return [...lines("resumed"), ...lines("best"), ...ticks];
  }

  upright(mark) {
    const x = this.across(mark.x).toFixed(1);
    return shape("line", { class: `mark ${mark.kind} colour-${mark.colour}`, x1: x, x2: x, y1: CHART.top, y2: this.base });
  }

  drawnRings() {
    const marks = this.shownMarks("best").filter((mark) => this.isDrawable(mark.y) && !this.hidden.has(mark.of));
    return marks.map((mark) => {
      const [cx, cy] = [this.across(mark.x).toFixed(1), this.up(mark.y).toFixed(1)];
      return shape("circle", { class: `ring colour-${mark.colour}`, cx, cy, r: 4.5 });
    });
  }

  listen(svg) {
    const epochAt = (event) => {
      const place = event.clientX - svg.getBoundingClientRect().left;
      const share = (place - this.left) / (this.right - this.left);
      return this.range[0] + Math.min(1, Math.max(0, share)) * (this.range[1] - this.range[0]);
    };
    let anchor = null;
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "touch") anchor = epochAt(event);
      this.point(epochAt(event));
    });
    svg.addEventListener("pointermove", (event) => this.point(epochAt(event), anchor));
    svg.addEventListener("pointerup", (event) => {
      const ends = [anchor, epochAt(event)].sort((one, other) => one - other);
      const isDrag = anchor !== null && this.across(ends[1]) - this.across(ends[0]) > 8;
      anchor = null;
      if (isDrag) zoomTo(ends);
    });
    svg.addEventListener("pointerleave", () => { anchor = null; this.unpoint(); });
    svg.addEventListener("dblclick", () => zoomTo(null));
    svg.addEventListener("blur", () => this.unpoint());
    svg.addEventListener("keydown", (event) => this.walk(event));
  }

  /** Move along the points with the arrow keys. */
  walk(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const epochs = this.visible().flatMap((curve) => (curve.look === "fine" ? [] : curve.x));
    const sorted = [...new Set(epochs)].filter((epoch) => this.isInside(epoch)).sort((one, other) => one - other);
    if (!direction || !sorted.length) return;
    event.preventDefault();
    const index = this.hover === null ? 0 : nearestIndex(sorted, this.hover) + direction;
    this.point(sorted[Math.min(sorted.length - 1, Math.max(0, index))]);
  }

  unpoint() {
    this.hover = null;
    this.tip.hidden = true;
    this.overlay.replaceChildren();
  }

  /** Show the values nearest to an epoch, and the stretch that is being selected. */
  point(epoch, anchor = null) {
    const found = this.nearest(epoch);
    this.hover = found.epoch ?? epoch;
    const x = this.across(this.hover).toFixed(1);
    const drawn = [shape("line", { class: "hair", x1: x, x2: x, y1: CHART.top, y2: this.base })];
    if (anchor !== null) drawn.unshift(this.selection(anchor, epoch));
    for (const { curve, at } of found.points.filter((point) => this.isDrawable(point.value))) {
      const place = { cx: this.across(at).toFixed(1), cy: this.up(curve.y[curve.x.indexOf(at)]).toFixed(1), r: 3.5 };
      drawn.push(shape("circle", { class: `spot colour-${curve.colour}`, ...place }));
    }
    this.overlay.replaceChildren(...drawn);
    this.showTip(found);
  }

  selection(from, to) {
    const [left, right] = [this.across(from), this.across(to)].sort((one, other) => one - other);
    return shape("rect", { class: "selection", x: left, y: CHART.top, width: right - left, height: this.base - CHART.top });
  }

  /** Return the point of every curve that is nearest to an epoch, as far as it is near at all. */
  nearest(epoch) {
    const points = this.visible().filter((curve) => curve.x.length).map((curve) => {
      const index = nearestIndex(curve.x, epoch);
      return { curve, at: curve.x[index], value: curve.y[index] };
    });
    const closest = Math.min(...points.map((point) => Math.abs(point.at - epoch)));
    const best = points.find((point) => Math.abs(point.at - epoch) === closest);
    const reach = Math.max(0.5, (this.range[1] - this.range[0]) / 60);
    return { epoch: best?.at, points: points.filter((point) => Math.abs(point.at - best.at) <= reach) };
  }

  showTip({ epoch, points }) {
    if (!points.length) return this.unpoint();
    const rows = points.map(({ curve, value }) => element("tr", {},
      element("td", {}, lineSample(curve), curve.label),
      element("td", { class: "number" }, value === null ? "nan" : shownNumber(value) + this.unit)));
    const notes = this.marks.filter((mark) => this.isVisible(mark) && mark.text && this.isNear(mark.x));
    const texts = [...new Set(notes.map((mark) => mark.text))].slice(0, 4);
    this.tip.replaceChildren(
      element("strong", {}, `epoch ${shownNumber(epoch)}`), element("table", {}, ...rows),
      ...texts.map((text) => element("div", { class: "note" }, text)));
    this.tip.hidden = false;
    this.placeTip();
  }

  isNear(epoch) {
    return this.isInside(epoch) && Math.abs(this.across(epoch) - this.across(this.hover)) < 5;
  }

  placeTip() {
    const x = this.across(this.hover), width = this.tip.offsetWidth, room = this.plot.clientWidth;
    const wanted = x + 14 + width > room ? x - 14 - width : x + 14;
    this.tip.style.left = `${Math.max(0, Math.min(wanted, room - width))}px`;
    this.tip.style.top = `${CHART.top}px`;
  }
}

const MARK_WORDS = { best: "best epoch", resumed: "resumed", skipped: "skipped step" };

/** What is drawn later lies above: single steps at the bottom, and dashes over the lines they may coincide with. */
function depth(curve) {
  return curve.look === "fine" ? 0 : 1 + curve.dash;
}

function firstFrom(numbers, wanted) {
  const index = numbers.findIndex((number) => number >= wanted);
  return index < 0 ? numbers.length : index;
}

function lineSample(curve) {
  const svg = shape("svg", { class: "sample", width: 18, height: 8, "aria-hidden": "true" });
  const line = { class: `curve ${curve.look} colour-${curve.colour}`, d: "M0,4H18" };
  svg.append(shape("path", { ...line, "stroke-dasharray": CHART.dashes[curve.dash] ?? "" }));
  return svg;
}

function markSample(kind) {
  const svg = shape("svg", { class: "sample", width: 10, height: 10, "aria-hidden": "true" });
  svg.append(shape("line", { class: `mark ${kind} colour-plain`, x1: 5, x2: 5, y1: 0, y2: 10 }));
  return svg;
}
