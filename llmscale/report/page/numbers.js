// Numbers as people read them, and columns of them. Columns may hold null: nothing is known there.

const SUFFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];

const trimmed = (value, digits) => String(Number(value.toPrecision(digits)));

// Four digits or so: 12,345 · 0.0123 · 3e-05; `quantity` shortens large ones: 1.24B.
function format(value, digits = 4) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return trimmed(value, digits);
}

function quantity(value, digits = 3) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e18) return value.toExponential(digits - 1);
  for (const [unit, suffix] of SUFFIXES)
    if (size >= unit * 0.9995) return trimmed(value / unit, digits) + suffix;
  return size !== 0 && size < 1e-3 ? value.toExponential(digits - 1) : trimmed(value, digits);
}

function bytes(value) {
  if (value == null) return "–";
  return value >= 2 ** 30 ? `${trimmed(value / 2 ** 30, 3)} GiB` : `${trimmed(value / 2 ** 20, 3)} MiB`;
}

const percent = (value) => (value == null ? "–" : `${trimmed(value * 100, 3)} %`);

function duration(hours) {
  if (hours == null) return "–";
  const s = hours * 3600;
  if (s < 120) return `${trimmed(s, 3)} s`;
  if (s < 7200) return `${trimmed(s / 60, 3)} min`;
  return s < 172800 ? `${trimmed(hours, 3)} h` : `${trimmed(hours / 24, 3)} days`;
}

// Labels of an axis's ticks: as many digits as their distance needs, one suffix for all.
function tickLabels(splits) {
  const known = splits.filter((value) => value != null);
  if (!known.length) return splits.map(() => "");
  const largest = Math.max(...known.map(Math.abs));
  const gap = known.length > 1 ? Math.min(...known.slice(1).map((v, i) => Math.abs(v - known[i])).filter((d) => d > 0)) : largest;
  if (largest !== 0 && (largest < 1e-3 || largest >= 1e18)) return splits.map((v) => (v == null ? "" : v === 0 ? "0" : shortExponent(v)));
  const [unit, suffix] = SUFFIXES.find(([size]) => largest >= size && (size > 1e3 || largest >= 1e4)) || [1, ""];
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(gap / unit) + 1e-9)));
  return splits.map((v) => (v == null ? "" : v === 0 ? "0" : (v / unit).toFixed(digits) + suffix));
}

const shortExponent = (value) => {
  const [mantissa, exponent] = value.toExponential(3).split("e");
  return `${Number(mantissa)}e${Number(exponent)}`;
};

// Ticks of a logarithmic axis: whole powers of ten over many decades, 1, 2 and 5 of each over few, even steps within one.
function logTicks(low, high, most) {
  const decades = Math.log10(high / low);
  if (decades < 0.7) return null;
  const mantissas = decades * 3 <= most ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / most));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const mantissa of mantissas) {
      const tick = Number(`${mantissa}e${power}`);
      if (power % every === 0 && tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9)) ticks.push(tick);
    }
  return ticks;
}

// Even steps of 1, 2 or 5 times a power of ten.
function evenTicks(low, high, most) {
  const rough = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((size) => size >= rough) || rough;
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-9); n++) ticks.push(Number((n * step).toPrecision(12)));
  return ticks;
}

const logLabels = (splits) => splits.map((v) => (v == null ? "" : v >= 1e-3 && v < 1e18 ? quantity(v) : shortExponent(v)));
const exponents = (splits) => splits.map((v) => (v == null ? "" : v === 0 ? "0" : shortExponent(v)));

// `at` (ascending) carried from the column `from` (ascending) to the column `to`, by straight lines; before the first
// value in proportion, behind the last one as that.
function interpolate(at, from, to) {
  let i = 0;
  return at.map((value) => {
    while (i < from.length && from[i] < value) i++;
    if (i < from.length && from[i] === value) return to[i];
    if (i === from.length) return to[i - 1];
    if (i === 0) return from[0] > 0 ? (to[0] * value) / from[0] : to[0];
    return to[i - 1] + ((to[i] - to[i - 1]) * (value - from[i - 1])) / (from[i] - from[i - 1]);
  });
}

const EARLY = 0.08;

// Mean of the values around each, whose weights halve with every `halfLife` units of `at` to either side: a curve that
// neither lags behind its values nor runs ahead of them. Near 0, where a loss falls fastest, it reaches less far.
function smooth(at, values, halfLife) {
  if (!(halfLife > 0)) return values;
  const sums = new Float64Array(values.length), weights = new Float64Array(values.length);
  for (const order of [1, -1]) {
    let sum = 0, weight = 0, last = null;
    for (let n = 0; n < values.length; n++) {
      const i = order > 0 ? n : values.length - 1 - n;
      if (values[i] == null) continue;
      const kept = last == null ? 0 : 2 ** (-Math.abs(at[i] - last) / Math.min(halfLife, EARLY * Math.max(at[i], last)));
      sum *= kept;
      weight *= kept;
      sums[i] += sum;
      weights[i] += weight;
      sum += values[i];
      weight += 1;
      last = at[i];
    }
  }
  return values.map((value, i) => (value == null ? null : (sums[i] + value) / (weights[i] + 1)));
}
