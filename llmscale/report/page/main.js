// The page: what the reader chooses, and drawing again when that changes.

const began = performance.now();
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const view = { axis: "steps", unit: "nats", smoothing: 0, logLoss: false, hidden: new Set(), theme: "auto" };

// report.html#axis=tokens&unit=bits&theme=dark opens with these.
const CHOICES = { axis: Object.keys(X_AXES), unit: ["nats", "bits"], theme: ["auto", "light", "dark"] };

let charts = [];
let zoom = null;
let isZooming = false;

// Charts of the same horizontal axis show the same part of it.
const linked = {
  zoomed(source) {
    if (isZooming || !source.plot) return;
    const { min, max } = source.plot.scales.x;
    zoom = [min, max];
    isZooming = true;
    for (const chart of charts)
      if (chart !== source && chart.plot) chart.plot.setScale("x", { min, max });
    queueMicrotask(() => (isZooming = false));
    byId("whole").disabled = false;
  },
  whole() {
    zoom = null;
    drawAll();
  },
};

function drawAll() {
  document.documentElement.dataset.theme = view.theme === "auto" ? (dark.matches ? "dark" : "light") : view.theme;
  const scrolled = scrollY;
  charts.forEach((chart) => chart.plot && chart.plot.destroy());
  charts = [];
  const main = byId("charts");
  main.style.minHeight = `${main.offsetHeight}px`;
  main.replaceChildren();
  view.halfLife = Math.max(1, ...data.runs.map((run) => run.axis.steps.at(-1))) * 0.08 * (view.smoothing / 100) ** 2.5;
  view.xLabel = X_AXES[view.axis].label;
  const marks = drawnMarks(data.runs, view), sections = new Map();
  for (const chart of data.charts) {
    const curves = drawnCurves(chart, data.runs, view);
    if (!curves.length) continue;
    if (!sections.has(chart.section)) sections.set(chart.section, section(chart.section));
    charts.push(new Chart(chart, curves, marks, view, sections.get(chart.section), linked));
  }
  if (charts.length) {
    charts[0].card.classList.add("wide");
    charts[0].hasWords = true;
  }
  for (const box of sections.values()) {
    const narrow = [...box.children].filter((card) => !card.classList.contains("wide"));
    if (narrow.length % 2) narrow.at(-1).classList.add("wide");
  }
  isZooming = true;
  const whole = wholeAxis();
  charts.forEach((chart) => chart.draw(zoom || whole));
  queueMicrotask(() => (isZooming = false));
  main.style.minHeight = "";
  scrollTo(0, scrolled);
  drawControls();
}

// The part of the horizontal axis that the charts have together, from the first start on: all show it.
function wholeAxis() {
  const ends = charts.flatMap(({ curves, marks }) => [...curves.map(({ xs }) => [xs[0], xs.at(-1)]), ...marks.map(({ x }) => [x, x])]);
  const low = Math.min(...ends.map(([first]) => first)), high = Math.max(...ends.map(([, last]) => last));
  return high > low ? [low, high] : [low - 0.5, high + 0.5];
}

function section(title) {
  const box = element("div", { class: "charts" });
  byId("charts").append(element("section", null, element("h2", null, title), box));
  return box;
}

// A click on a head sorts its table, unknown values last; the field filters it.
function sortBy(head) {
  const cell = head.closest("th"), body = head.closest("table").tBodies[0], isDown = cell.ariaSort === "ascending";
  for (const other of cell.parentNode.cells) other.removeAttribute("aria-sort");
  cell.ariaSort = isDown ? "descending" : "ascending";
  const valueOf = (row) => row.cells[cell.cellIndex].dataset.value ?? (cell.className === "number" ? "" : row.cells[cell.cellIndex].textContent);
  const order = (a, b) => (a === "") - (b === "") || (isNaN(a - b) ? a.localeCompare(b) : a - b) * (isDown ? -1 : 1);
  body.append(...[...body.rows].sort((a, b) => order(valueOf(a), valueOf(b))));
}

function filterRuns({ target }) {
  const wanted = target.value.toLowerCase();
  for (const row of target.closest("section").querySelector("tbody").rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
}

function drawControls() {
  const known = data.runs.filter((run) => run.flops_per_token);
  const axes = [["steps", "steps"], ["tokens", "tokens"], ["hours", "time"], ["flops", "FLOPs"]];
  choice(byId("x-axis"), axes.map(([key, label]) => ({ key, label, why: key === "flops" && !known.length ? "no run says the shape of its model" : "" })), view.axis,
    (key) => { view.axis = key; zoom = null; drawAll(); });
  const able = data.runs.filter((run) => run.bytes_per_token || run.validation_bytes_per_token);
  choice(byId("unit"), [{ key: "nats", label: "nats/token" }, { key: "bits", label: "bits/byte", why: able.length ? "" : data.runs[0].why_no_bytes_per_token }], view.unit,
    (key) => { view.unit = key; drawAll(); });
  choice(byId("theme"), [["auto", "auto"], ["light", "light"], ["dark", "dark"]].map(([key, label]) => ({ key, label })), view.theme,
    (key) => { view.theme = key; drawAll(); });
  byId("half-life").textContent = view.smoothing > 0 ? `± ${quantity(view.halfLife, 2)} steps` : "off";
  byId("whole").disabled = !zoom;
  byId("legend").replaceChildren(...(data.runs.length > 1 ? data.runs.map(legendEntry) : []));
}

function legendEntry(run) {
  const isShown = !view.hidden.has(run.index);
  const toggle = () => {
    if (isShown) view.hidden.add(run.index);
    else view.hidden.delete(run.index);
    drawAll();
  };
  return element("button", { type: "button", "aria-pressed": String(isShown), title: run.folder, on: { click: toggle } },
    element("i", { class: "swatch", style: `background:var(--c${run.index % 8})` }), element("span", null, run.name));
}

function begin() {
  document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
  view.unit = data.unit;
  for (const [key, value] of new URLSearchParams(location.hash.slice(1)))
    if (Object.hasOwn(CHOICES, key) && CHOICES[key].includes(value)) view[key] = value;
  const points = Math.max(...data.runs.map((run) => run.axis.steps.length));
  view.smoothing = points >= 100 ? 45 : 0;
  const slider = byId("smoothing");
  slider.value = view.smoothing;
  let pending = false;
  slider.addEventListener("input", () => {
    view.smoothing = Number(slider.value);
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => { pending = false; drawAll(); });
  });
  byId("log-loss").addEventListener("change", (event) => { view.logLoss = event.target.checked; drawAll(); });
  byId("whole").addEventListener("click", linked.whole);
  document.querySelector('a[href="#glossary"]').addEventListener("click", () => { byId("glossary").open = true; });
  for (const head of document.querySelectorAll("button.head")) head.addEventListener("click", () => sortBy(head));
  document.querySelector('input[type="search"]')?.addEventListener("input", filterRuns);
  dark.addEventListener("change", () => view.theme === "auto" && drawAll());
  new ResizeObserver(() => charts.forEach((chart) => chart.resize())).observe(byId("charts"));
  drawAll();
  // uPlot draws when this task is over.
  setTimeout(() => {
    const took = Math.round(performance.now() - began);
    document.body.dataset.drawnMs = took;
    byId("footer").textContent = `${charts.length} charts drawn in ${took} ms. Drag over a chart to zoom, double-click to see all of it.`;
  });
}

begin();
