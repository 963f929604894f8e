/* Elements of the page: texts among their children stay texts, whatever they contain. */

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 2"];

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

function shape(tag, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

/** Return a button that is on or off; `change` is called with its new state. */
function toggle(attributes, isOn, change, ...children) {
  const button = element("button", { type: "button", ...attributes, "aria-pressed": String(isOn) }, ...children);
  button.addEventListener("click", () => {
    const isNowOn = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(isNowOn));
    change(isNowOn);
  });
  return button;
}

function section(title, ...children) {
  const shown = children.filter((child) => child !== null);
  return shown.length ? element("section", {}, element("h2", {}, title), ...shown) : null;
}

function folded(title, ...children) {
  return element("details", {}, element("summary", {}, title), ...children);
}

/** Return a table that scrolls by itself if it is too wide; cells are texts, elements or numbers. */
function table(head, rows) {
  const areNumbers = head.map((_, place) => rows.some((row) => typeof row[place] === "number"));
  const cells = (tag, row) => row.map((value, place) => cell(tag, value, areNumbers[place]));
  const body = rows.map((row) => element("tr", row.attributes ?? {}, ...cells("td", row)));
  const top = element("tr", {}, ...cells("th", head));
  const whole = element("table", {}, element("thead", {}, top), element("tbody", {}, ...body));
  return element("div", { class: "scroll" }, whole);
}

function cell(tag, value, isNumber) {
  const shown = typeof value === "number" ? shownNumber(value) : value ?? "";
  return element(tag, isNumber ? { class: "number" } : {}, shown);
}

/** Return a table without the columns that say nothing. */
function filledTable(head, rows) {
  const isFilled = (_, place) => rows.some((row) => row[place] !== "");
  return table(head.filter(isFilled), rows.map((row) => row.filter(isFilled)));
}

function withAttributes(row, attributes) {
  return Object.assign(row, { attributes });
}

/** Return a short piece of a curve as it is drawn, for legends. */
function lineSample(curve) {
  const svg = shape("svg", { class: "sample", width: 18, height: 8, "aria-hidden": "true" });
  const look = `curve ${curve.look} colour-${curve.colour}`;
  svg.append(shape("path", { class: look, d: "M0,4H18", "stroke-dasharray": DASHES[curve.dash] }));
  return svg;
}

function markSample(kind) {
  const svg = shape("svg", { class: "sample", width: 10, height: 10, "aria-hidden": "true" });
  svg.append(shape("line", { class: `mark ${kind} colour-plain`, x1: 5, x2: 5, y1: 0, y2: 10 }));
  return svg;
}
