// Which charts a report has, and what each draws. `view` is what the reader chose: {axis, unit, smoothing, logLoss,
// hidden}; a run is one of the data's, with its `index`.

const X_AXES = {
  steps: { label: "steps", format: (x) => `step ${format(x)}`, value: (run, steps) => steps },
  tokens: { label: "tokens", format: (x) => `${quantity(x, 4)} tokens`, value: (run, steps) => interpolate(steps, run.axis.steps, run.axis.tokens) },
  hours: { value: (run, steps) => interpolate(steps, run.axis.steps, run.axis.hours) },
  flops: {
    label: "training FLOPs", format: (x) => `${format(x)} FLOPs`,
    value: (run, steps) => X_AXES.tokens.value(run, steps).map((tokens) => tokens * run.flops_per_token),
  },
};
// Hours are shown in the unit that the longest run needs: [name, units per hour].
const timeUnit = (hours) => (hours < 1 / 20 ? ["seconds", 3600] : hours < 3 ? ["minutes", 60] : hours < 100 ? ["hours", 1] : ["days", 1 / 24]);

const NATS_PER_BIT = Math.LN2;
const LOG_FROM = 300; // a norm whose values differ by more than this factor has a logarithmic axis

class ChartList {
  constructor(data, view) {
    this.view = view;
    this.charts = data.charts;
    this.runs = data.runs.filter((run) => !view.hidden.has(run.index));
    this.several = data.runs.length > 1;
    if (view.axis === "flops") this.runs = this.runs.filter((run) => run.flops_per_token);
    const longest = Math.max(0, ...data.runs.map((run) => run.axis.hours.at(-1) || 0));
    [this.timeName, this.timeFactor] = timeUnit(longest);
    this.lastStep = Math.max(1, ...data.runs.map((run) => run.axis.steps.at(-1)));
  }

  // The part of the horizontal axis that the runs have together: all of their charts show it.
  get whole() {
    const ends = this.runs.map((run) => {
      const { steps } = run.axis, others = [run.validation, ...run.evaluations].map((column) => column.steps.at(-1) ?? 0);
      return this.x(run, [run.marks.length ? Math.min(run.marks[0].step, steps[0]) : steps[0], Math.max(steps.at(-1), ...others)]);
    });
    const low = Math.min(...ends.map(([first]) => first)), high = Math.max(...ends.map(([, last]) => last));
    return high > low ? [low, high] : [low - Math.max(0.5, low * 0.05), high + Math.max(0.5, high * 0.05)];
  }

  get xLabel() {
    return this.view.axis === "hours" ? `time in training steps, ${this.timeName}` : X_AXES[this.view.axis].label;
  }

  formatX = (x) => (this.view.axis === "hours" ? duration(x / this.timeFactor) : X_AXES[this.view.axis].format(x));

  x(run, steps) {
    // The same column for the same steps: curves that share it need no joining.
    this.columns ||= new Map();
    const of = this.columns.get(run) || new Map();
    this.columns.set(run, of);
    if (!of.has(steps)) {
      const xs = X_AXES[this.view.axis].value(run, steps);
      of.set(steps, this.view.axis === "hours" ? xs.map((hours) => hours * this.timeFactor) : xs);
    }
    return of.get(steps);
  }

  get halfLife() {
    return this.lastStep * 0.08 * (this.view.smoothing / 100) ** 2.5;
  }

  // A training column of every run: a smoothed line, and what it was made of behind it.
  lines(name, convert = (run, value) => value, { smoothed = true, positive = false, stepped = false } = {}) {
    return this.runs.flatMap((run) => {
      const curve = run.curves[name];
      if (!curve) return [];
      const steps = curve.steps || run.axis.steps;
      const raw = curve.values.map((value) => (value == null || (positive && value <= 0) ? null : convert(run, value)));
      if (raw.every((value) => value == null)) return [];
      const base = { label: run.name, colour: colourOf(run.index), dash: dashOf(run.index), xs: this.x(run, steps), stepped };
      const halfLife = smoothed ? this.halfLife : 0;
      if (!(halfLife > 0)) return [{ ...base, ys: raw }];
      return [
        { ...base, ys: raw, alpha: 0.25, width: 1, quiet: true, dash: [] },
        { ...base, ys: smooth(steps, raw, halfLife) },
      ];
    });
  }

  marks() {
    return this.runs.flatMap((run) =>
      run.marks
        .filter((mark) => mark.kind !== "end")
        .map((mark) => ({ ...mark, x: this.x(run, run.marks.map((m) => m.step))[run.marks.indexOf(mark)] }))
        // Twelve runs begin at the same place: their starts say nothing.
        .filter((mark) => !(this.several && mark.kind === "start" && mark.text.startsWith("start")))
        .map((mark) => (this.several ? { ...mark, text: `${run.name}: ${mark.text}`, colour: colourOf(run.index) } : mark)),
    );
  }

  lossUnit(run, split) {
    if (this.view.unit === "nats") return 1;
    const ratio = split === "validation" ? run.validation_bytes_per_token : run.bytes_per_token;
    return ratio ? 1 / NATS_PER_BIT / ratio : null;
  }

  losses(name) {
    const runs = this.runs;
    this.runs = runs.filter((run) => this.lossUnit(run) != null);
    const curves = this.lines(name, (run, value) => value * this.lossUnit(run));
    this.runs = runs;
    return curves;
  }

  validations(label = (run) => run.name) {
    return this.runs.flatMap((run) => {
      const factor = this.lossUnit(run, "validation");
      const { steps, loss, bits_per_byte: bits } = run.validation;
      const said = this.view.unit === "bits" && bits;
      if (!steps.length || (factor == null && !said)) return [];
      const ys = loss.map((value, i) => (said && bits[i] != null ? bits[i] : value == null || factor == null ? null : value * factor));
      if (ys.every((y) => y == null)) return [];
      return [{ label: label(run), colour: colourOf(run.index), dash: dashOf(run.index), xs: this.x(run, steps), ys, points: true }];
    });
  }

  all() {
    const unit = this.view.unit === "bits" ? "bits per byte" : "nats per token";
    const marks = this.marks();
    const common = { group: "x", whole: this.whole, xLabel: this.xLabel, wholeTicks: this.view.axis === "steps", ticksX: this.view.axis === "flops" ? exponents : null, formatX: this.formatX, marks };
    const logY = this.view.logLoss;
    const chart = (section, title, unit, curves, more = {}) => ({ section, title, unit, curves, ...common, ...more });
    // Charts of one number each, as training/step_metrics.py declares them.
    const declared = this.charts.map(({ name, section, title, unit: of, factor, is_smoothed: smoothed, is_positive: positive, is_stepped: stepped, log_axis: axis }) => {
      const curves = this.lines(name, (run, value) => value * factor, { smoothed, positive, stepped });
      return chart(section, title, of, curves, { logY: axis === "always" || (axis === "wide" && isWide(curves)) });
    });
    const training = this.losses("loss");
    if (!this.several) training.filter((curve) => !curve.quiet).forEach((curve) => (curve.label = "training"));
    // Of several runs the validation has a chart of its own alone: twice as many curves are too many.
    const onLoss = this.several ? [] : this.validations(() => "validation").map((curve) => ({ ...curve, dash: [7, 4], colour: colourOf(1) }));
    const list = [
      chart("Loss", onLoss.length ? "Training and validation loss" : "Training loss", unit, [...training, ...onLoss], {
        wide: true, logY, words: !this.several,
        keys: onLoss.length ? [["training", swatch(colourOf(0), [])], ["validation", swatch(colourOf(1), [7, 4])]] : null,
      }),
      chart("Loss", "Validation loss", unit, this.validations(), { logY }),
      this.againstLaw(),
      ...this.ofSets(chart, unit, logY),
      ...this.evaluations(chart),
      ...declared.filter((spec) => spec.section !== "Speed and memory" && !spec.section.startsWith("GPU")),
      ...declared.filter((spec) => spec.section === "Speed and memory"),
      this.phases(common),
      this.dataWait(chart),
      this.memory(chart),
      ...declared.filter((spec) => spec.section.startsWith("GPU")),
    ];
    return list.filter((spec) => spec && spec.curves.length);
  }

  ofSets(chart, unit, logY) {
    const run = this.chosen((candidate) => Object.keys(candidate.validation.by_set || {}).length || ofSetNames(candidate).length);
    if (!run) return [];
    const names = [...new Set([...ofSetNames(run), ...Object.keys(run.validation.by_set || {})])];
    const curves = names.flatMap((name, i) => {
      const colours = { colour: colourOf(i), dash: dashOf(i) };
      const training = run.curves[`loss of ${name}`], bySet = run.validation.by_set || {};
      // A set may be named like what every object has.
      const validation = Object.hasOwn(bySet, name) ? bySet[name] : null;
      const steps = training && (training.steps || run.axis.steps);
      return [
        ...(training ? [{ label: name, ...colours, xs: this.x(run, steps), ys: smooth(steps, training.values, this.halfLife) }] : []),
        ...(validation ? [{ label: `${name}, validation`, ...colours, dash: [7, 4], xs: this.x(run, run.validation.steps), ys: validation, points: true }] : []),
      ];
    });
    return [chart("Loss", "Loss by set", "nats per token" + (this.several ? `, ${run.name}` : ""), curves.filter((curve) => curve.ys.some((y) => y != null)), {
      logY, control: this.chooser(), keys: names.map((name, i) => [name, swatch(colourOf(i), dashOf(i))]),
    })];
  }

  evaluations(chart) {
    const names = new Map();
    for (const run of this.runs)
      for (const one of run.evaluations) names.set(`${one.task}\0${one.value}`, one);
    return [...names.values()].map(({ task, value }) => {
      const curves = this.runs.flatMap((run) =>
        run.evaluations.filter((one) => one.task === task && one.value === value).map((one) => ({
          label: run.name, colour: colourOf(run.index), dash: dashOf(run.index), xs: this.x(run, one.steps), ys: one.values, points: true,
        })));
      return chart("Evaluation", task, value, curves);
    });
  }

  // The run of what can show one only: the one that the reader chose, if it has it.
  chosen(has) {
    const able = this.runs.filter(has);
    return able.find((run) => run.index === this.view.one) || able[0];
  }

  chooser() {
    if (!this.several) return null;
    const run = this.chosen(() => true);
    const options = this.runs.map((one) => element("option", { value: one.index, selected: one === run }, one.name));
    return element("select", { "aria-label": "run", on: { change: (event) => this.view.choose(Number(event.target.value)) } }, options);
  }

  phases(common) {
    const run = this.chosen((candidate) => candidate.time_shares.steps);
    if (!run) return null;
    const names = ["other", "optimizer_step", "forward_backward", "data_wait"];
    const words = { other: "other", optimizer_step: "optimizer step", forward_backward: "forward and backward", data_wait: "data wait" };
    const colours = [...PHASE_COLOURS[theme()]].reverse();
    const shares = names.map((name) => run.time_shares[name].map((share) => (share == null ? null : share * 100)));
    const xs = this.x(run, run.time_shares.steps);
    // Areas from 0, the highest behind: what is seen of each is its own share.
    const curves = names.map((name, i) => ({
      label: words[name], colour: colours[i], fill: true, width: 0, xs, shown: shares[i],
      ys: shares[i].map((_, at) => (shares[i][at] == null ? null : shares.slice(i).reduce((sum, column) => sum + column[at], 0))),
    }));
    return {
      section: "Speed and memory", title: "Share of time by phase", unit: "% of a step", curves, ...common, keepOrder: true,
      marks: this.several ? [] : common.marks, control: this.chooser(), range: () => [0, 100], formatY: (value) => percent(value == null ? null : value / 100),
      keys: names.map((name, i) => [words[name], swatch(colours[i], [], 8)]),
    };
  }

  dataWait(chart) {
    const curves = this.runs.filter((run) => run.time_shares.steps).map((run) => ({
      label: run.name, colour: colourOf(run.index), dash: dashOf(run.index), xs: this.x(run, run.time_shares.steps),
      ys: smooth(run.time_shares.steps, run.time_shares.data_wait.map((share) => (share == null ? null : share * 100)), this.halfLife),
    }));
    return chart("Speed and memory", "Waiting for data", "% of a step", curves);
  }

  memory(chart) {
    const measured = this.lines("peak_memory_bytes", (run, value) => value / 2 ** 30, { smoothed: false });
    if (!this.several) measured.forEach((curve) => (curve.label = "measured"));
    const estimated = this.runs.flatMap((run) => {
      const starts = run.estimated_memory;
      if (!starts.length) return [];
      const end = run.axis.steps.at(-1), values = starts.map((start) => start.bytes / 2 ** 30);
      return [{
        label: this.several ? `${run.name}, estimated` : "estimated", colour: this.several ? colourOf(run.index) : colourOf(1), dash: this.several ? [2, 4] : [7, 4], width: this.several ? 1.25 : 1.75, stepped: true,
        xs: this.x(run, [...new Set([...starts.map((start) => start.step), end])]),
        ys: [...new Set([...starts.map((start) => start.step), end])].map((step) => values[starts.findLastIndex((start) => start.step <= step)]),
      }];
    });
    const onCpu = this.runs.some((run) => run.estimated_memory.some((start) => start.device === "cpu"));
    return chart("Speed and memory", "Memory of one rank", "GiB at the peak", [...measured, ...estimated], {
      range: (u, low, high) => [0, high == null ? 1 : high * 1.08],
      keys: estimated.length ? [["measured", swatch(this.several ? variable("--faint") : colourOf(0), [])], ["estimated", this.several ? swatch(variable("--faint"), [2, 4]) : swatch(colourOf(1), [7, 4])]] : null,
      note: onCpu && estimated.length ? "On a CPU the measured memory is all that the main rank's process holds, libraries included; the estimate is of a GPU's." : null,
    });
  }

  againstLaw() {
    const runs = this.runs.filter((run) => run.law && run.law.tokens.length && run.curves.loss);
    const measured = Math.max(...runs.map((run) => Math.max(...run.curves.loss.values.map((loss) => loss ?? 0))));
    const curves = runs.flatMap((run) => {
      const { values, steps } = run.curves.loss, at = steps || run.axis.steps;
      // After few tokens the law expects far more than any model has.
      const highest = 1.1 * Math.max(measured, run.law.loss.at(-1));
      const low = (losses) => losses.map((loss) => (loss <= highest ? loss : null));
      const colour = colourOf(run.index), name = this.several ? `${run.name}, ` : "", xs = run.law.tokens;
      return [
        { label: `${name}measured`, colour, dash: dashOf(run.index), xs: interpolate(at, run.axis.steps, run.axis.tokens), ys: smooth(at, values, Math.max(this.halfLife, this.lastStep * 0.002)) },
        { label: `${name}expected at this size`, colour: this.several ? colour : colourOf(1), dash: [7, 4], xs, ys: low(run.law.loss), bare: true },
        ...(this.several ? [] : [{ label: "best for the same FLOPs", colour: colourOf(2), dash: [2, 3], xs, ys: low(run.law.optimal_loss), bare: true }]),
      ];
    });
    const grey = variable("--faint");
    return {
      section: "Loss", title: "Beside Chinchilla's law", unit: "nats per token", curves, marks: [], logX: true, xLabel: "tokens (logarithmic)",
      formatX: (x) => `${quantity(x, 4)} tokens`,
      keys: this.several
        ? [["measured", swatch(grey, [])], ["expected at this size", swatch(grey, [7, 4])]]
        : [["measured", swatch(colourOf(0), [])], ["expected at this size", swatch(colourOf(1), [7, 4])], ["best model for the same FLOPs", swatch(colourOf(2), [2, 3])]],
    };
  }
}

const ofSetNames = (run) => Object.keys(run.curves).filter((name) => name.startsWith("loss of ")).map((name) => name.slice(8));

function isWide(curves) {
  let low = Infinity, high = 0;
  for (const { ys } of curves) for (const y of ys) if (y != null) (low = Math.min(low, y)), (high = Math.max(high, y));
  return high / low > LOG_FROM;
}
