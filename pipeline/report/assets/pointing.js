/* Pointing at a chart: the values under the mouse, a finger or the arrow keys, and a stretch to zoom into. */

class Pointing {
  constructor(chart) {
    Object.assign(this, { chart, epoch: null, anchor: null });
    this.tip = element("div", { class: "tip", hidden: "" });
  }

  /** Listen to a plot that has just been drawn. */
  attach(svg) {
    this.svg = svg;
    this.layer = shape("g");
    svg.append(this.layer);
    this.chart.plot.append(this.tip);
    this.tip.hidden = true;
    svg.addEventListener("pointerdown", (event) => this.press(event));
    svg.addEventListener("pointermove", (event) => this.show(this.epochAt(event)));
    svg.addEventListener("pointerup", (event) => this.release(event));
    svg.addEventListener("pointerleave", () => this.leave());
    svg.addEventListener("dblclick", () => zoomTo(null));
    svg.addEventListener("blur", () => this.leave());
    svg.addEventListener("keydown", (event) => this.walk(event));
  }

  epochAt(event) {
    const { left, right, range } = this.chart;
    const share = (event.clientX - this.svg.getBoundingClientRect().left - left) / (right - left);
    return range[0] + Math.min(1, Math.max(0, share)) * (range[1] - range[0]);
  }

  /** A finger scrolls the page; only a mouse or a pen selects. */
  press(event) {
    this.anchor = event.pointerType === "touch" ? null : this.epochAt(event);
    this.show(this.epochAt(event));
  }

  release(event) {
    const ends = [this.anchor, this.epochAt(event)].sort((one, other) => one - other);
    const isDrag = this.anchor !== null && this.chart.across(ends[1]) - this.chart.across(ends[0]) > 8;
    this.anchor = null;
    if (isDrag) zoomTo(ends);
  }

  leave() {
    Object.assign(this, { epoch: null, anchor: null });
    this.tip.hidden = true;
    this.layer.replaceChildren();
  }

  /** Move along the epochs with the arrow keys. */
  walk(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const known = this.chart.visible().flatMap((curve) => (curve.look === "fine" ? [] : curve.x));
    const epochs = [...new Set(known)].filter((epoch) => this.chart.isInside(epoch)).sort((one, other) => one - other);
    if (!direction || !epochs.length) return;
    event.preventDefault();
    const index = this.epoch === null ? 0 : nearestIndex(epochs, this.epoch) + direction;
    this.show(epochs[Math.min(epochs.length - 1, Math.max(0, index))]);
  }

  /** Show the values nearest to an epoch, and the stretch that is being selected. */
  show(epoch) {
    const points = this.nearest(epoch);
    if (!points.length) return this.leave();
    const distance = (point) => Math.abs(point.at - epoch);
    this.epoch = points.reduce((one, other) => (distance(other) < distance(one) ? other : one)).at;
    this.layer.replaceChildren(...this.selection(epoch), this.hair(), ...points.flatMap((point) => this.spot(point)));
    this.fillTip(points);
    this.placeTip();
  }

  /** Return the point of every curve that is nearest to an epoch, as far as it is near at all. */
  nearest(epoch) {
    const { range } = this.chart, reach = Math.max(0.5, (range[1] - range[0]) / 60);
    const curves = this.chart.visible().filter((curve) => curve.x.length);
    const points = curves.map((curve) => {
      const index = nearestIndex(curve.x, epoch);
      return { curve, at: curve.x[index], value: curve.y[index] };
    });
    const closest = Math.min(...points.map((point) => Math.abs(point.at - epoch)));
    return points.filter((point) => Math.abs(point.at - epoch) <= closest + reach);
  }

  hair() {
    const x = this.chart.across(this.epoch).toFixed(1);
    return shape("line", { class: "hair", x1: x, x2: x, y1: PLOT.top, y2: this.chart.base });
  }

  selection(epoch) {
    if (this.anchor === null) return [];
    const [x, right] = [this.anchor, epoch].map((end) => this.chart.across(end)).sort((one, other) => one - other);
    const height = this.chart.base - PLOT.top;
    return [shape("rect", { class: "selection", x, y: PLOT.top, width: right - x, height })];
  }

  spot({ curve, at, value }) {
    if (!this.chart.isDrawable(value) || !this.chart.isInside(at)) return [];
    const [cx, cy] = [this.chart.across(at).toFixed(1), this.chart.up(value).toFixed(1)];
    return [shape("circle", { class: `spot colour-${curve.colour}`, cx, cy, r: 3.5 })];
  }

  fillTip(points) {
    const rows = points.map(({ curve, at, value }) => {
      const shown = value === null ? "nan" : shownNumber(value) + this.chart.unit;
      const place = at === this.epoch ? "" : ` at ${shownNumber(at)}`;
      const name = element("td", {}, lineSample(curve), curve.label + place);
      return element("tr", {}, name, element("td", { class: "number" }, shown));
    });
    const title = element("strong", {}, `epoch ${shownNumber(this.epoch)}`);
    this.tip.replaceChildren(title, element("table", {}, ...rows), ...this.notes());
    this.tip.hidden = false;
  }

  /** Return what the marks that are close say. */
  notes() {
    const isNear = (mark) => Math.abs(this.chart.across(mark.x) - this.chart.across(this.epoch)) < 5;
    const shown = Object.keys(MARK_WORDS).flatMap((kind) => this.chart.shownMarks(kind));
    const texts = shown.filter((mark) => mark.text && isNear(mark)).map((mark) => mark.text);
    return [...new Set(texts)].slice(0, 4).map((text) => element("div", { class: "note" }, text));
  }

  placeTip() {
    const x = this.chart.across(this.epoch), width = this.tip.offsetWidth, room = this.chart.plot.clientWidth;
    const wanted = x + 14 + width > room ? x - 14 - width : x + 14;
    this.tip.style.left = `${Math.max(0, Math.min(wanted, room - width))}px`;
    this.tip.style.top = `${PLOT.top}px`;
  }
}
