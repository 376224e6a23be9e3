// Numbers as people read them, and columns of them. Columns may hold null: nothing is known there.

const SUFFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];

const trimmed = (value, digits) => String(Number(value.toPrecision(digits)));

// Four digits or so: 12,345 · 0.0123 · 3e-05; `quantity` shortens large ones: 1.24B.
function format(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return trimmed(value, 4);
}

function quantity(value, digits = 3) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e18) return value.toExponential(digits - 1);
  for (const [unit, suffix] of SUFFIXES)
    if (size >= unit * 0.9995) return trimmed(value / unit, digits) + suffix;
  return trimmed(value, digits);
}

function duration(hours) {
  if (hours == null) return "–";
  const s = hours * 3600;
  if (s < 120) return `${trimmed(s, 3)} s`;
  if (s < 7200) return `${trimmed(s / 60, 3)} min`;
  return s < 172800 ? `${trimmed(hours, 3)} h` : `${trimmed(hours / 24, 3)} days`;
}

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
