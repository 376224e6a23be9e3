// What a report says in words and tables.

const SUMMARY = [
  { label: "parameters", of: (run) => quantity(run.num_parameters) },
  { label: "steps", of: ({ summary: s }) => (s.total_steps && s.total_steps !== s.steps ? `${format(s.steps)} of ${format(s.total_steps)}` : format(s.steps)) },
  { label: "tokens", of: (run) => quantity(run.summary.tokens) },
  { label: "time in steps", of: (run) => duration(run.summary.hours) },
  { label: "last loss", of: (run) => format(run.summary.loss), why: "nats per token" },
  { label: "validation loss", of: (run) => format(run.summary.validation_loss), why: "nats per token" },
  { label: "bits per byte", of: (run) => format(run.summary.bits_per_byte), why: "of the last validation" },
  { label: "tokens/s", of: (run) => quantity(run.summary.tokens_per_second), why: "median" },
  { label: "MFU", of: (run) => percent(run.summary.mfu), why: "median" },
  { label: "peak memory", of: (run) => bytes(run.summary.peak_memory_bytes), why: "of one rank" },
  { label: "goodput", of: (run) => percent(run.summary.goodput), why: "steps that count, of the wall time" },
  { label: "starts", of: (run) => format(run.summary.starts) },
];

const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const runLabel = (run) => element("span", { style: "display:inline-flex;gap:7px;align-items:center" }, swatch(colourOf(run.index), dashOf(run.index)), run.name);

function summary(runs) {
  const shown = SUMMARY.filter(({ of }) => runs.some((run) => of(run) !== "–"));
  if (runs.length === 1)
    return element("div", { class: "tiles" }, shown.map(({ label, of, why }) =>
      element("div", { class: "tile" }, element("b", null, of(runs[0])), element("span", null, why ? `${label}, ${why}` : label))));
  const columns = [{ label: "run", kind: "name" }, ...shown.map(({ label }) => ({ label, kind: "number" })), { label: "ended", kind: "name" }];
  return table(columns, runs.map((run) => [runLabel(run), ...shown.map(({ of }) => of(run)), shortened(run.summary.ended, 48)]));
}

// Every run of a folder, also those without a chart: sorted by a click on a head, reduced to rows that contain a text.
const LISTED = [
  { label: "run", kind: "name", of: (run) => run.run },
  { label: "state", kind: "name", of: (run) => run.state },
  { label: "step", kind: "number", of: (run) => run.step, show: (run) => (run.total_steps ? `${format(run.step)} of ${format(run.total_steps)}` : format(run.step)) },
  { label: "loss", kind: "number", of: (run) => run.loss, show: (run) => format(run.loss) },
  { label: "best validation loss", kind: "number", of: (run) => run.validation_loss, show: (run) => format(run.validation_loss) },
  { label: "goodput", kind: "number", of: (run) => run.goodput, show: (run) => percent(run.goodput) },
  { label: "last seen", kind: "name", of: (run) => run.last_seen, show: (run) => (run.last_seen || "–").replace("T", " ").replace("+00:00", " UTC") },
  { label: "why", of: (run) => run.why || (run.state === "lost" ? "killed, or its host is gone" : "") },
  { label: "command", of: (run) => run.command },
];

function allRuns(listed, view) {
  if (!listed.length) return null;
  const box = element("div");
  const rank = (a, b) => (a == null) - (b == null) || (a == null ? 0 : (typeof a === "number" ? a - b : String(a).localeCompare(String(b))) * (view.isDown ? -1 : 1));
  const draw = () => {
    const wanted = view.filter.toLowerCase();
    const rows = listed.filter((run) => LISTED.some(({ of }) => String(of(run) ?? "").toLowerCase().includes(wanted)));
    const by = LISTED.find(({ label }) => label === view.sort);
    if (by) rows.sort((a, b) => rank(by.of(a), by.of(b)));
    const heads = LISTED.map(({ label, kind }) => ({
      kind,
      label: element("button", {
        type: "button", class: "head", on: { click: () => { view.isDown = view.sort === label && !view.isDown; view.sort = label; draw(); } },
      }, view.sort === label ? `${label} ${view.isDown ? "▼" : "▲"}` : label),
    }));
    const cell = (run, { label, kind, of, show }) =>
      element("td", { class: label === "state" ? `name ${run.state}` : kind || null }, show ? show(run) : of(run) || "–");
    const made = table(heads, rows.map((run) => LISTED.map((column) => cell(run, column))));
    if (rows.length > 24) made.classList.add("tall");
    box.replaceChildren(element("p", { class: "chooser" }, `${rows.length} of ${listed.length}`), made);
  };
  const input = element("input", { type: "search", placeholder: "name, state, error, command", "aria-label": "filter", value: view.filter,
    on: { input: (event) => { view.filter = event.target.value; draw(); } } });
  draw();
  return [element("p", { class: "chooser" }, "filter ", input), box];
}

function lawTable(runs) {
  const known = runs.filter((run) => run.law);
  if (!known.length) return null;
  const columns = ["run", "parameters N", "tokens D", "D / N", "last loss", "validation loss", "expected loss", "best for these FLOPs: N", "D"];
  const rows = known.map((run) => {
    const { summary: s, num_parameters: n } = run;
    const range = s.expected_loss_low == null ? "" : ` (${trimmed(s.expected_loss_low, 3)} to ${trimmed(s.expected_loss_high, 3)})`;
    const expected = run.law.applies ? `${trimmed(s.expected_loss, 4)}${range}` : "not below a uniform guess";
    return [runLabel(run), quantity(n), quantity(s.tokens), quantity(s.tokens / n), format(s.loss), format(s.validation_loss), expected, quantity(s.optimal_parameters), quantity(s.optimal_tokens)];
  });
  const { name, source } = known[0].law;
  const beyond = known.some((run) => run.law.is_extrapolation);
  return [
    table(columns.map((label, i) => ({ label, kind: i ? "number" : "name" })), rows),
    element("p", { class: "chooser" }, `${name}: ${source}. Nats per token, on text and a tokenizer like theirs; in brackets 80 % by the errors of the fit.`,
      beyond ? " It rests on models of 44M to 16B parameters: beyond, this is an extrapolation." : ""),
  ];
}

function timeline(runs) {
  const rows = runs.flatMap((run) =>
    run.marks.map((mark) => [
      ...(runs.length > 1 ? [runLabel(run)] : []), format(mark.step),
      quantity(interpolate([mark.step], run.axis.steps, run.axis.tokens)[0]), duration(interpolate([mark.step], run.axis.steps, run.axis.hours)[0]),
      element("td", { class: mark.kind }, mark.text),
    ]));
  const columns = [...(runs.length > 1 ? [{ label: "run", kind: "name" }] : []), { label: "step", kind: "number" }, { label: "tokens", kind: "number" }, { label: "time", kind: "number" }, { label: "what" }];
  const made = rows.length ? table(columns, rows) : null;
  if (made && rows.length > 12) made.classList.add("tall");
  return made;
}

function samples(runs, chosen, choose) {
  const able = runs.filter((run) => run.samples.length);
  if (!able.length) return null;
  const [run, chooser] = chosenRun(able, chosen, choose);
  const rows = run.samples.map(({ step, prompt, text }) => {
    const begins = prompt && text.startsWith(prompt);
    return [format(step), element("pre", null, begins ? element("b", null, prompt) : "", begins ? text.slice(prompt.length) : text)];
  });
  const made = table([{ label: "step", kind: "number" }, { label: "text" }], rows);
  made.classList.add("tall");
  return [chooser, made].filter(Boolean);
}

// The run of a table of one: [run, what chooses it]. Nothing chooses where only one is able.
function chosenRun(able, chosen, choose) {
  const run = able.find((one) => one.index === chosen) || able[0];
  const options = able.map((one) => element("option", { value: one.index, selected: one === run }, one.name));
  const select = element("select", { "aria-label": "run", on: { change: (event) => choose(Number(event.target.value)) } }, options);
  return [run, able.length > 1 ? element("p", { class: "chooser" }, "of ", select) : null];
}

// A row per block and a cell per expert: fuller with more tokens, alarming without any.
function expertLoads(runs, chosen, choose) {
  const able = runs.filter((run) => run.expert_load.loads?.[0]?.length);
  if (!able.length) return null;
  const [run, chooser] = chosenRun(able, chosen, choose), { step, blocks, loads } = run.expert_load;
  const cell = (load, expert) =>
    element("i", { title: `expert ${expert}: ${format(load)}`, style: `background: ${load ? `color-mix(in srgb, var(--accent) ${Math.min(100, load * 50)}%, var(--card))` : "var(--alarm)"}` });
  const rows = loads.map((row, i) =>
    [blocks[i], element("div", { class: "strip" }, row.map(cell)), format(Math.min(...row)), format(Math.max(...row))]);
  const columns = [{ label: "block", kind: "number" }, { label: `experts 0 to ${loads[0].length - 1}` }, { label: "least", kind: "number" }, { label: "most", kind: "number" }];
  const made = table(columns, rows);
  if (rows.length > 16) made.classList.add("tall");
  const words = `Tokens of each expert at step ${format(step)}, 1 for the mean of its block. Full colour: 2 or more.`;
  return [chooser, made, element("p", { class: "chooser" }, words)].filter(Boolean);
}

function differences(data) {
  if (!data.differences.length) return null;
  const columns = [{ label: "setting", kind: "key" }, ...data.runs.map((run) => ({ label: runLabel(run) }))];
  const made = table(columns, data.differences.map(({ section, key, values }) => [`${section}: ${key}`, ...values.map((value) => value ?? "–")]));
  made.classList.add("tall");
  return made;
}

function settings(runs) {
  return runs.map((run) => {
    const sections = Object.entries(run.tables).filter(([, entries]) => Object.keys(entries).length);
    const tables = sections.map(([section, entries]) =>
      element("details", null, element("summary", null, section), table([{ label: "setting", kind: "key" }, { label: "value" }], Object.entries(entries))));
    if (!tables.length) return null;
    if (runs.length === 1) return element("div", null, tables);
    return element("details", null, element("summary", null, runLabel(run)), element("div", { style: "padding:0 10px 4px" }, tables));
  }).filter(Boolean);
}
