// One chart: curves of runs over one axis, marks, a tip at the cursor. uPlot draws.

const PLOT_HEIGHT = 250, WIDE_HEIGHT = 360, TIP_GAP = 14, MARK_REACH = 6;
const FEW = 20; // points of a curve that are drawn as points too
const INCREMENTS = Array.from({ length: 66 }, (_, n) => n - 25).flatMap((power) => [1, 2, 5].map((mantissa) => Number(`${mantissa}e${power}`)));
const MARK_SIGNS = { spike: "▲", nonfinite: "✕", slow: "◆", router: "■" };

class Chart {
  // spec: {title, unit, note?, wide?, keys?, group, logY?, logX?, xLabel, formatX, formatY, range?, curves, marks}
  // curve: {label, colour, dash, width, alpha?, points?, bare?, fill?, xs, ys, quiet?, stepped?, shown?}
  // `bare`: no points; `quiet`: no line in the tip; `shown`: what the tip says instead of ys.
  // mark: {x, kind, text, short, colour}
  constructor(spec, box, linked) {
    this.spec = spec;
    this.linked = linked;
    const heading = element("h3", null, spec.title, element("small", null, spec.unit));
    if (spec.control) heading.append(spec.control);
    this.tip = element("div", { class: "tip" });
    this.place = element("div", { role: "img", "aria-label": `${spec.title}, ${spec.unit}` });
    this.card = element("section", { class: spec.wide ? "card wide" : "card" }, heading);
    if (spec.keys) this.card.append(element("div", { class: "keys" }, spec.keys.map(([label, picture]) => element("span", null, picture, label))));
    this.card.append(this.place);
    if (spec.note) this.card.append(element("p", null, spec.note));
    this.card.append(this.tip);
    box.append(this.card);
  }

  draw(range) {
    const { spec } = this;
    spec.curves = spec.curves.flatMap((curve) => [curve, ...loners(curve)]);
    const tables = spec.curves.map((curve) => [curve.xs, curve.ys]);
    // What another curve lacks is `undefined` and no gap; null is one.
    const joined = tables.every(([xs]) => xs === tables[0][0]) ? [tables[0][0], ...tables.map(([, ys]) => ys)] : uPlot.join(tables);
    this.data = joined;
    this.plot = new uPlot(this.options(), joined, this.place);
    // A cursor that another chart leads shows no tip.
    this.plot.over.addEventListener("mouseenter", () => (this.isUnderMouse = true));
    this.plot.over.addEventListener("mouseleave", () => { this.isUnderMouse = false; this.tip.style.display = "none"; });
    const shown = range || spec.whole;
    if (shown) this.plot.setScale("x", { min: shown[0], max: shown[1] });
  }

  options() {
    const { spec } = this;
    const faint = variable("--faint"), grid = { stroke: variable("--grid"), width: 1 };
    const axis = { stroke: faint, grid, ticks: { stroke: variable("--line"), size: 4, width: 1 }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif" };
    const self = this;
    return {
      width: this.place.clientWidth || 600,
      height: spec.wide ? WIDE_HEIGHT : PLOT_HEIGHT,
      padding: [spec.marks.length ? 16 : 8, 16, 0, 4],
      legend: { show: false },
      cursor: {
        y: false,
        points: { size: 6 },
        drag: { x: true, y: false, setScale: true },
        bind: spec.group ? { dblclick: () => () => self.linked.whole() } : {},
        sync: spec.group ? { key: spec.group, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } } : undefined,
      },
      scales: {
        x: { time: false, distr: spec.logX ? 3 : 1, ...(spec.logX ? { range: (u, low, high) => [low, high] } : {}) },
        y: spec.logY ? { distr: 3, range: (u, low, high) => (low == null ? [1, 10] : [low / 1.1, high * 1.1]) } : { range: spec.range || ((u, low, high) => padded(low, high)) },
      },
      axes: [
        { ...axis, incrs: spec.whole && spec.wholeTicks ? INCREMENTS.filter((size) => size >= 1) : INCREMENTS, label: spec.xLabel, labelSize: 18, labelGap: 0, size: 26, gap: 3, space: 70, values: (u, splits) => (spec.ticksX || (spec.logX ? logLabels : tickLabels))(splits), ...(spec.logX ? logAxis(70) : {}) },
        { ...axis, incrs: INCREMENTS, size: (u, values) => 14 + 6.8 * Math.max(3, ...(values || []).map((text) => (text || "").length)), gap: 4, space: 34,
          values: (u, splits) => (spec.logY && splits.length && splits.at(-1) / splits[0] >= 5 ? logLabels : tickLabels)(splits), ...(spec.logY ? logAxis(34) : {}) },
      ],
      series: [{}, ...spec.curves.map((curve) => this.series(curve))],
      hooks: {
        draw: [(u) => drawMarks(u, spec)],
        setCursor: [(u) => self.showTip(u)],
        setScale: [(u, key) => key === "x" && spec.group && self.linked.zoomed(self)],
      },
    };
  }

  series(curve) {
    const few = curve.ys.length <= FEW;
    const made = {
      label: curve.label, stroke: withAlpha(curve.colour, curve.alpha ?? 1), width: curve.width ?? 1.75, dash: curve.dash && curve.dash.length ? curve.dash : undefined,
      points: { show: Boolean(curve.points || few) && !curve.quiet && !curve.fill && !curve.stepped && !curve.bare, size: curve.points && !curve.alone ? 6 : 4, fill: curve.colour, stroke: curve.colour },
    };
    if (curve.fill) made.fill = curve.colour;
    if (curve.stepped) made.paths = uPlot.paths.stepped({ align: 1 });
    return made;
  }

  showTip(u) {
    const { spec } = this;
    const { left, top } = u.cursor;
    if (left == null || left < 0 || !this.isUnderMouse) return void (this.tip.style.display = "none");
    const x = u.cursor.idx == null ? u.posToVal(left, "x") : this.data[0][u.cursor.idx];
    const rows = [];
    spec.curves.forEach((curve, i) => {
      if (curve.quiet || curve.alone) return;
      const index = nearest(this.data[i + 1], u.cursor.idx);
      if (index < 0) return;
      const value = curve.shown ? curve.shown[index] : this.data[i + 1][index];
      rows.push([value, element("div", null, swatch(curve.colour, curve.dash || [], curve.fill ? 8 : 2.5), element("span", null, curve.label), (spec.formatY || even)(value))]);
    });
    if (rows.length > 4 && !spec.keepOrder) rows.sort((a, b) => b[0] - a[0]);
    const near = spec.marks.filter((mark) => Math.abs(u.valToPos(mark.x, "x") - left) <= MARK_REACH).slice(0, 6);
    this.tip.replaceChildren(
      element("div", null, element("b", null, spec.formatX(x))),
      ...rows.slice(0, 16).map(([, row]) => row),
      ...near.map((mark) => element("div", { class: "mark" }, element("span", null, mark.text))),
    );
    this.tip.style.display = "block";
    const over = u.over.getBoundingClientRect(), card = this.card.getBoundingClientRect();
    const at = over.left - card.left + left, width = this.tip.offsetWidth;
    this.tip.style.left = `${at + TIP_GAP + width > card.width ? Math.max(2, at - TIP_GAP - width) : at + TIP_GAP}px`;
    this.tip.style.top = `${over.top - card.top + Math.max(0, Math.min(top, over.height - this.tip.offsetHeight))}px`;
  }

  resize() {
    const width = this.place.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.plot.height });
  }
}

const logAxis = (space) => ({
  splits: (u, index, low, high) => {
    const most = (index === 0 ? u.bbox.width : u.bbox.height) / devicePixelRatio / space;
    return logTicks(low, high, most) || evenTicks(low, high, most);
  },
  filter: (u, splits) => splits,
});

// What stands alone between gaps, which no line shows.
function loners(curve) {
  if (curve.points || curve.fill || curve.quiet || curve.bare || curve.ys.length <= FEW) return [];
  const alone = curve.ys.map((y, i) => i).filter((i) => curve.ys[i] != null && curve.ys[i - 1] == null && curve.ys[i + 1] == null);
  return alone.length ? [{ ...curve, xs: alone.map((i) => curve.xs[i]), ys: alone.map((i) => curve.ys[i]), points: true, alone: true }] : [];
}

// Equally many digits below each other.
const even = (value) => (Math.abs(value) >= 1e-3 && Math.abs(value) < 1000 ? value.toPrecision(4) : format(value));

function nearest(values, index) {
  if (index == null) return -1;
  for (let distance = 0; distance < values.length; distance++) {
    if (values[index - distance] != null) return index - distance;
    if (values[index + distance] != null) return index + distance;
    if (distance > 4000) return -1;
  }
  return -1;
}

function padded(low, high) {
  if (low == null) return [0, 1];
  const margin = high - low < 1e-3 * Math.abs(high) ? (high === 0 ? 1 : Math.abs(high) * 0.1) : (high - low) * 0.06;
  const bottom = low - margin;
  return [low >= 0 && (bottom < 0 || low < (high - low) * 0.15) ? 0 : bottom, high + margin];
}

function withAlpha(colour, alpha) {
  return alpha >= 1 ? colour : colour + Math.round(alpha * 255).toString(16).padStart(2, "0");
}

// Restarts as lines over the whole height, with words above where there is room; other marks as signs there.
function drawMarks(u, spec) {
  const { ctx } = u, ratio = devicePixelRatio, { left, top, width, height } = u.bbox;
  const faint = variable("--faint"), alarm = variable("--alarm");
  ctx.save();
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = "middle";
  let free = -Infinity;
  for (const mark of spec.marks) {
    const at = Math.round(u.valToPos(mark.x, "x", true));
    if (at < left - 1 || at > left + width + 1) continue;
    const sign = MARK_SIGNS[mark.kind];
    if (sign) {
      ctx.fillStyle = mark.colour || alarm;
      ctx.textAlign = "center";
      ctx.fillText(sign, at, top - 7 * ratio);
      if (!mark.colour) line(ctx, at, top, height, withAlpha(alarm, 0.35), [2 * ratio, 3 * ratio], ratio);
      continue;
    }
    line(ctx, at, top, height, mark.colour || withAlpha(faint, 0.75), [4 * ratio, 3 * ratio], ratio);
    if (!spec.words) continue;
    const wide = ctx.measureText(mark.short).width, begins = at;
    if (begins < free || begins + wide > left + width) continue;
    ctx.textAlign = "left";
    ctx.fillStyle = faint;
    ctx.fillText(mark.short, begins, top - 7 * ratio);
    free = begins + wide + 12 * ratio;
  }
  ctx.restore();
}

function line(ctx, at, top, height, colour, dash, ratio) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = ratio;
  ctx.setLineDash(dash);
  ctx.beginPath();
  ctx.moveTo(at, top);
  ctx.lineTo(at, top + height);
  ctx.stroke();
  ctx.setLineDash([]);
}
