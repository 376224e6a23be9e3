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

const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];

const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = (index) => variable(`--c${index % 8}`);
const dashOf = (index) => DASHES[Math.floor(index / 8) % DASHES.length];

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
