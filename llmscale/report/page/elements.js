// Elements of the page. Text of a run becomes text nodes only: nothing here parses markup.

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "on") for (const [event, handler] of Object.entries(value)) made.addEventListener(event, handler);
    else if (value != null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child != null) made.append(child instanceof Node ? child : String(child));
  return made;
}

// Eight colours that differ in brightness too, so that colour-blind readers tell them apart (after Okabe and Ito), for
// each theme; more runs than that go round them again with other dashes.
const COLOURS = {
  light: ["#0072b2", "#d55e00", "#00805d", "#b3478f", "#8a6d00", "#3aa0dc", "#5b3fa0", "#4d4d4d"],
  dark: ["#58b4f0", "#ff8f3f", "#2ed3a3", "#f09ac9", "#f0e442", "#a9dcff", "#b9a2ff", "#c4c9cf"],
};
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];

const theme = () => document.documentElement.dataset.theme;
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = (index) => COLOURS[theme()][index % 8];
const dashOf = (index) => DASHES[Math.floor(index / 8) % DASHES.length];

function swatch(colour, dash) {
  const namespace = "http://www.w3.org/2000/svg";
  const picture = document.createElementNS(namespace, "svg");
  const line = document.createElementNS(namespace, "line");
  for (const [key, value] of Object.entries({ class: "swatch", width: 24, height: 10 })) picture.setAttribute(key, value);
  const drawn = { x1: 1, x2: 23, y1: 5, y2: 5, stroke: colour, "stroke-width": 2.5, "stroke-dasharray": dash.join(" ") };
  for (const [key, value] of Object.entries(drawn)) line.setAttribute(key, value);
  picture.append(line);
  return picture;
}

// Buttons of which one is pressed.
function choice(box, options, chosen, choose) {
  box.replaceChildren(
    ...options.map(({ key, label, why }) =>
      element("button", {
        type: "button", "aria-pressed": String(key === chosen), disabled: Boolean(why), title: why || null,
        on: { click: () => choose(key) },
      }, label)),
  );
}

// A table of columns {label, kind?} and rows of cells: texts, or elements. `kind` is a class of the style.
function table(columns, rows) {
  const head = element("tr", null, columns.map((c) => element("th", { class: c.kind || null }, c.label)));
  const body = rows.map((cells) =>
    element("tr", null, cells.map((cell, i) => (cell instanceof HTMLTableCellElement ? cell : element("td", { class: columns[i].kind || null }, cell)))));
  return element("div", { class: "scroll" }, element("table", null, element("thead", null, head), element("tbody", null, body)));
}
