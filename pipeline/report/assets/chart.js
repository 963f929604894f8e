/* One chart: curves over epochs that can be switched, and seen on a linear or a logarithmic axis. */

const PLOT = { height: 236, top: 10, right: 14, bottom: 26 };
const MARK_WORDS = { best: "best epoch", resumed: "resumed", skipped: "skipped step" };

/** What all charts share: the range of epochs, the part of it that is shown, the experiments that are switched off. */
const shared = { charts: [], range: [0, 1], zoom: null, hiddenStories: new Set() };

function redrawAll() {
  for (const chart of shared.charts) chart.draw();
}

function zoomTo(range) {
  shared.zoom = range;
  document.body.classList.toggle("zoomed", range !== null);
  redrawAll();
}

function switchStory(story, isShown) {
  if (isShown) shared.hiddenStories.delete(story);
  else shared.hiddenStories.add(story);
  redrawAll();
}

/** What is drawn later lies above: single steps at the bottom, and dashes over the lines they may coincide with. */
function depth(curve) {
  return curve.look === "fine" ? 0 : 1 + curve.dash;
}

class Chart {
  /** A curve is {kind, story, label, x, y, colour, dash, look}, a mark {kind, story, colour, x, y, of, text}. */
  constructor({ title, note = "", unit = "", curves, marks = [], hidden = [] }) {
    const drawnStories = new Set(curves.map((curve) => curve.story));
    this.marks = marks.filter((mark) => drawnStories.has(mark.story));
    Object.assign(this, { title, unit, curves, isLog: false, hidden: new Set(hidden) });
    this.plot = element("div", { class: "plot" });
    this.pointing = new Pointing(this);
    this.node = element("figure", { class: "chart" }, this.header(note), this.legend(), this.plot);
    shared.charts.push(this);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  header(note) {
    const caption = element("figcaption", {}, this.title);
    if (note) caption.append(element("span", { class: "note" }, note));
    const change = (isOn) => {
      this.isLog = isOn;
      this.draw();
    };
    const button = toggle({ class: "scale" }, false, change, "log");
    button.disabled = !this.curves.some((curve) => curve.y.some((value) => value > 0));
    button.title = button.disabled ? "no positive values" : "logarithmic y axis";
    return element("div", { class: "head" }, caption, button);
  }

  legend() {
    const kinds = new Set(this.curves.map((curve) => curve.kind));
    const marked = Object.keys(MARK_WORDS).filter((kind) => this.marks.some((mark) => mark.kind === kind));
    const words = marked.map((kind) => element("span", { class: "key" }, markSample(kind), MARK_WORDS[kind]));
    return element("div", { class: "legend" }, ...[...kinds].map((kind) => this.legendEntry(kind)), ...words);
  }

  legendEntry(kind) {
    const [first, ...others] = this.curves.filter((curve) => curve.kind === kind);
    // One entry for the curves of several experiments, which have a colour each.
    const isShared = others.some((curve) => curve.colour !== first.colour);
    const sample = lineSample(isShared ? { ...first, colour: "plain" } : first);
    const change = (isOn) => {
      if (isOn) this.hidden.delete(kind);
      else this.hidden.add(kind);
      this.draw();
    };
    return toggle({ class: "key" }, !this.hidden.has(kind), change, sample, kind);
  }

  isVisible({ story, kind }) {
    return !shared.hiddenStories.has(story) && !this.hidden.has(kind);
  }

  visible() {
    return this.curves.filter((curve) => this.isVisible(curve));
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    this.measure(width);
    const svg = shape("svg", { width, height: PLOT.height, role: "img", tabindex: "0", "aria-label": this.title });
    const curves = this.visible().reverse().sort((one, other) => depth(one) - depth(other));
    svg.append(...this.axes(), ...this.drawnMarks(), ...this.clipped(curves.flatMap((curve) => this.drawn(curve))));
    svg.append(...this.drawnRings());
    this.plot.replaceChildren(svg);
    this.pointing.attach(svg);
  }

  /** Return what is drawn inside the plot alone: zoomed in, lines continue beyond it. */
  clipped(nodes) {
    const id = `plot-${shared.charts.indexOf(this)}`, clip = shape("clipPath", { id });
    const [width, height] = [this.right - this.left + 8, this.base + 2];
    clip.append(shape("rect", { x: this.left - 4, y: 0, width, height }));
    const inside = shape("g", { "clip-path": `url(#${id})` });
    inside.append(...nodes);
    return [clip, inside];
  }

  /** Decide both extents, the ticks, and the room their labels need. */
  measure(width) {
    this.range = shared.zoom ?? shared.range;
    this.extent = paddedExtent(this.shownValues(), this.isLog);
    this.yTicks = this.isLog ? logTicks(this.extent, 5) : linearTicks(this.extent, 5);
    this.left = 14 + 6.7 * Math.max(2, ...this.yTicks.map((tick) => tick.label.length));
    this.right = width - PLOT.right;
    this.base = PLOT.height - PLOT.bottom;
    this.xTicks = linearTicks(this.range, (this.right - this.left) / 70, shared.zoom ? 0 : 1);
  }

  *shownValues() {
    for (const { x, y } of this.visible()) {
      for (let index = 0; index < x.length; index++) {
        if (this.isInside(x[index]) && this.isDrawable(y[index])) yield y[index];
      }
    }
  }

  isDrawable(value) {
    return value !== null && value !== undefined && (!this.isLog || value > 0);
  }

  isInside(epoch) {
    return epoch !== null && epoch >= this.range[0] && epoch <= this.range[1];
  }

  across(epoch) {
    const [from, to] = this.range;
    return this.left + ((epoch - from) / (to - from)) * (this.right - this.left);
  }

  up(value) {
    const place = (number) => (this.isLog ? Math.log10(number) : number);
    const [low, high] = this.extent.map(place);
    return this.base - ((place(value) - low) / (high - low)) * (this.base - PLOT.top);
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
    if (!runs.length) return [];
    const d = runs.map((run) => "M" + run.map((point) => point.join(",")).join("L")).join("");
    const isSparse = curve.look !== "fine" && curve.x.length <= (this.right - this.left) / 12;
    const dotted = (isSparse ? runs : runs.filter((run) => run.length === 1)).flat();
    const dots = dotted.map(([cx, cy]) => shape("circle", { class: `dot ${look}`, cx, cy, r: 2 }));
    return [shape("path", { class: look, d, "stroke-dasharray": DASHES[curve.dash] }), ...dots];
  }

  /** Return the stretches between gaps as places; one point beyond each side lets lines leave the plot. */
  runs({ x, y }) {
    const runs = [[]], [from, to] = this.range;
    const first = x.findIndex((epoch) => epoch >= from);
    for (let index = Math.max(0, first - 1); first >= 0 && index < x.length; index++) {
      if (!this.isDrawable(y[index])) runs.push([]);
      else runs.at(-1).push([this.across(x[index]).toFixed(1), this.up(y[index]).toFixed(1)]);
      if (x[index] > to) break;
    }
    return runs.filter((run) => run.length);
  }

  shownMarks(kind) {
    return this.marks.filter((mark) => mark.kind === kind && this.isVisible(mark) && this.isInside(mark.x));
  }

  drawnMarks() {
    const [top, base] = [PLOT.top, this.base];
    const uprights = [...this.shownMarks("resumed"), ...this.shownMarks("best")];
    const ticks = this.shownMarks("skipped").map((mark) => this.upright(mark, top - 4, top + 4));
    return [...uprights.map((mark) => this.upright(mark, top, base)), ...ticks];
  }

  upright(mark, y1, y2) {
    const x = this.across(mark.x).toFixed(1);
    return shape("line", { class: `mark ${mark.kind} colour-${mark.colour}`, x1: x, x2: x, y1, y2 });
  }

  drawnRings() {
    const marks = this.shownMarks("best").filter((mark) => this.isDrawable(mark.y) && !this.hidden.has(mark.of));
    return marks.map((mark) => {
      const [cx, cy] = [this.across(mark.x).toFixed(1), this.up(mark.y).toFixed(1)];
      return shape("circle", { class: `ring colour-${mark.colour}`, cx, cy, r: 4.5 });
    });
  }
}
