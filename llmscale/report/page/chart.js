// One chart: the curves of runs over one axis, and their marks. uPlot draws; its legend has the values at the cursor.

const PLOT_HEIGHT = 250, WIDE_HEIGHT = 360;
const LOG_FROM = 300; // a declared axis becomes logarithmic where values differ by more than this factor
const MARK_SIGNS = { spike: "▲", nonfinite: "✕", slow: "◆", router: "■" };
const X_AXES = {
  steps: { label: "steps", value: (run, steps) => steps },
  tokens: { label: "tokens", value: (run, steps) => interpolate(steps, run.axis.steps, run.axis.tokens) },
  hours: { label: "time in training steps", format: duration, value: (run, steps) => interpolate(steps, run.axis.steps, run.axis.hours) },
  flops: {
    label: "training FLOPs",
    value: (run, steps) => X_AXES.tokens.value(run, steps).map((tokens) => tokens * run.flops_per_token),
  },
};

// A chart's curves of the runs that are shown, over the reader's axis and in the reader's unit.
function drawnCurves(chart, runs, view) {
  const isLoss = chart.curves.some((curve) => curve.bytes_per_token);
  return chart.curves.flatMap((curve) => {
    const run = runs[curve.run], inBits = isLoss && view.unit === "bits";
    const isKnown = (view.axis !== "flops" || run.flops_per_token) && (!inBits || curve.bytes_per_token);
    if (view.hidden.has(curve.run) || !isKnown) return [];
    const steps = curve.steps || run.axis.steps, factor = inBits ? 1 / Math.LN2 / curve.bytes_per_token : 1;
    const ys = curve.values.map((value) => (value == null ? null : value * factor));
    const drawn = { ...curve, colour: colourOf(curve.colour ?? curve.run), xs: X_AXES[view.axis].value(run, steps), ys };
    drawn.dash = curve.is_dashed ? [7, 4] : dashOf(curve.colour ?? curve.run);
    if (!curve.is_smoothed || !(view.halfLife > 0)) return [drawn];
    const measured = { ...drawn, colour: `${drawn.colour}40`, width: 1, isQuiet: true };
    return [measured, { ...drawn, ys: smooth(steps, ys, view.halfLife) }];
  });
}

function drawnMarks(runs, view) {
  const shown = runs.filter((run) => !view.hidden.has(run.index) && (view.axis !== "flops" || run.flops_per_token));
  return shown.flatMap((run) => {
    const xs = X_AXES[view.axis].value(run, run.marks.map((mark) => mark.step));
    const colour = runs.length > 1 ? colourOf(run.index) : null;
    // Many runs begin at the same place.
    const isShown = ({ kind, text }) => kind !== "end" && !(runs.length > 1 && kind === "start" && text.startsWith("start"));
    return run.marks.map((mark, i) => ({ ...mark, x: xs[i], colour })).filter(isShown);
  });
}

class Chart {
  constructor(chart, curves, marks, view, box, linked) {
    Object.assign(this, { chart, curves, marks, view, linked });
    const unit = view.unit === "bits" && curves.some((curve) => curve.bytes_per_token) ? "bits per byte" : chart.unit;
    this.place = element("div", { role: "img", "aria-label": `${chart.title}, ${unit}` });
    this.card = element("section", { class: "card" }, element("h3", null, chart.title, element("small", null, unit)), this.place);
    if (chart.note) this.card.append(element("p", null, chart.note));
    box.append(this.card);
  }

  draw(range) {
    const tables = this.curves.map(({ xs, ys }) => [xs, ys]);
    const isShared = tables.every(([xs]) => xs === tables[0][0]);
    // What another curve lacks is `undefined` and no gap; null is one.
    this.plot = new uPlot(this.options(), isShared ? [tables[0][0], ...tables.map(([, ys]) => ys)] : uPlot.join(tables), this.place);
    this.plot.setScale("x", { min: range[0], max: range[1] });
  }

  options() {
    const { chart, linked } = this, font = "12px system-ui, sans-serif";
    const axis = { stroke: variable("--faint"), grid: { stroke: variable("--grid"), width: 1 }, font, labelFont: font, gap: 3 };
    const isLog = chart.log_axis === "always" || (chart.log_axis === "wide" && isWide(this.curves)) || (chart.section === "Loss" && this.view.logLoss);
    const labels = (u, splits) => splits.map((value) => (value == null ? "" : quantity(value, 5)));
    const { format: formatX = (x) => quantity(x, 5) } = X_AXES[this.view.axis];
    return {
      width: this.place.clientWidth || 600,
      height: this.card.classList.contains("wide") ? WIDE_HEIGHT : PLOT_HEIGHT,
      padding: [16, 16, 0, 4],
      cursor: {
        y: false,
        hover: { skip: [null] }, // the nearest value, also beside a gap
        bind: { dblclick: () => () => linked.whole() },
        sync: { key: "x", scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      },
      scales: {
        x: { time: false },
        y: isLog ? { distr: 3, range: (u, low, high) => (low == null ? [1, 10] : uPlot.rangeLog(low, high, 10, false)) } : {},
      },
      axes: [
        { ...axis, label: this.view.xLabel, labelSize: 18, labelGap: 0, size: 26, space: 70, values: (u, splits) => splits.map(formatX) },
        { ...axis, grid: { ...axis.grid, show: !isLog }, size: 60, space: 34, values: labels },
      ],
      series: [{ label: this.view.xLabel, value: (u, x) => formatX(x) }, ...this.curves.map(seriesOf)],
      hooks: {
        draw: [(u) => drawMarks(u, this.marks, this.hasWords)],
        setScale: [(u, key) => key === "x" && linked.zoomed(this)],
      },
    };
  }

  resize() {
    const width = this.place.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.plot.height });
  }
}

function seriesOf(curve) {
  const series = { label: curve.label, stroke: curve.colour, width: curve.width ?? 1.75, value: (u, y) => format(y) };
  if (curve.dash.length) series.dash = curve.dash;
  if (curve.isQuiet) series.class = "quiet";
  series.points = { size: curve.has_points ? 6 : 4, fill: curve.colour };
  if (curve.has_points) series.points.show = true;
  if (curve.is_stepped || curve.isQuiet) series.points.show = false;
  if (curve.is_stepped) series.paths = uPlot.paths.stepped({ align: 1 });
  return series;
}

function isWide(curves) {
  const positive = curves.flatMap(({ ys }) => ys.filter((y) => y > 0));
  const [low, high] = positive.reduce(([least, most], y) => [Math.min(least, y), Math.max(most, y)], [Infinity, 0]);
  return high / low > LOG_FROM;
}

// Restarts as lines over the whole height, with words in the first chart of one run; other marks as signs above.
function drawMarks(u, marks, hasWords) {
  const { ctx } = u, ratio = devicePixelRatio, { left, top, width, height } = u.bbox;
  ctx.save();
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.lineWidth = ratio;
  ctx.setLineDash([4 * ratio, 3 * ratio]);
  let free = -Infinity;
  for (const mark of marks) {
    const at = Math.round(u.valToPos(mark.x, "x", true)), sign = MARK_SIGNS[mark.kind];
    if (at < left || at > left + width) continue;
    ctx.fillStyle = ctx.strokeStyle = mark.colour || variable(sign ? "--alarm" : "--faint");
    if (!sign || !mark.colour) {
      ctx.beginPath();
      ctx.moveTo(at, top);
      ctx.lineTo(at, top + height);
      ctx.stroke();
    }
    const words = sign || (hasWords && !mark.colour ? mark.short : "");
    if (at < free && !sign) continue;
    ctx.textAlign = sign ? "center" : "left";
    ctx.fillText(words, at, top - 4 * ratio);
    free = sign ? free : at + ctx.measureText(words).width + 12 * ratio;
  }
  ctx.restore();
}
