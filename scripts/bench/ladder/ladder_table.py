"""ladder.py's table, claims and picture. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.bench.harness import GIB, machine_line, show_range
from scripts.bench.ladder.ladder_rungs import MODELS, VOCAB_SIZE

#: Factor claimed for a GPU, of the first rung's speed and inversely of its memory.
CLAIM = 10.0
Row = dict


def compare_memory(rows: list[Row]) -> None:
    """Add the ratios of the first row's memory to the last row's."""
    first, last = rows[0], rows[-1]
    if "memory_bytes" in first and "memory_bytes" in last:
        last["memory_ratio"] = first["memory_bytes"] / last["memory_bytes"]
    if "bytes" in first["dry_run"] and "bytes" in last["dry_run"]:
        last["dry_run"]["ratio"] = first["dry_run"]["bytes"] / last["dry_run"]["bytes"]


def judge(rows: Sequence[Row], *, is_gpu: bool) -> dict[str, object]:
    """Return the best rung's speed and memory over the first one's, and whether each is CLAIM times better."""
    speed = [(row["speed"]["median"], row["rung"]) for row in rows if "speed" in row]
    processor = [(row["processor"]["median"], row["rung"]) for row in rows if row.get("processor")]
    memory = [(row["memory_ratio"], row["rung"]) for row in rows if "memory_ratio" in row]
    dry = [(row["dry_run"]["ratio"], row["rung"]) for row in rows if "ratio" in row["dry_run"]]
    return {
        name: {"times": max(ratios)[0], "rung": max(ratios)[1], "met": max(ratios)[0] >= CLAIM, "on": where}
        for name, ratios, where in (
            ("speed", speed, "this GPU, measured" if is_gpu else "this CPU, measured; a GPU: not measured"),
            ("speed by processor time", processor, "this CPU, measured; a GPU: not measured"),
            ("memory", memory, "this GPU, measured" if is_gpu else "this CPU, measured"),
            ("GPU memory by the dry run", dry, "a GPU, counted; not measured"),
        )
        if ratios
    }


def heading(name: str, batch: int, *, is_gpu: bool) -> list[str]:
    m, place = MODELS[name], "GPU" if is_gpu else "CPU"
    head = f"{'':<34}{'ranks':>5}  {'tok/s/rank':<22}{'speed':<18}{'by processor':<18}{place + ' GiB':>9}{'':>7}"
    return [
        f"{name}: {m.n_layer} blocks, {m.seq_len} tokens, width {m.n_embd}, vocabulary {VOCAB_SIZE:,}; {place}: "
        f"{batch} sequences per rank; dry run: {m.batch} per GPU",
        f"{head}{'dry run GiB':>13}{'':>7}  loss 1",
    ]


def row_line(row: Row) -> str:
    dry = row["dry_run"]
    counted = f"{dry['bytes'] / GIB:13.2f}{dry.get('ratio', 1):6.1f}x" if "bytes" in dry else f"{'-':>13}{'':>7}"
    name = f"{row['number']:>2} {row['rung']}"
    if "speed" not in row:
        why = f"not on this machine: {row['not_here']}" if "not_here" in row else f"failed: {row['problem'][:80]}"
        return f"{name:<34}{why}; dry run{counted}"
    return (
        f"{name:<34}{row['ranks']:>5}  {show_range(row['tokens_per_second_per_rank'], ',.0f'):<22}"
        f"{_spread(row['speed']):<18}{_spread(row['processor']):<18}"
        f"{row['memory_bytes'] / GIB:9.2f}{row['memory_ratio']:6.1f}x{counted}  {row['first_loss']:.4f}"
    )


def _spread(ratio: Mapping[str, float] | None) -> str:
    return f"{ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f})" if ratio else "-"


def closing_lines(result: dict) -> list[str]:
    lines = ["speed: median (smallest-largest) over the rounds of tokens/s per rank over the first rung's of the round"]
    for model, claims in result["claim"].items():
        for name, claim in claims.items():
            met = "met" if claim["met"] else "NOT met"
            best = f"{claim['times']:.1f} times better than the first rung at best ({claim['rung']}; {claim['on']})"
            lines.append(f"{model}, {name}: {best}: ten times {met}")
    return [*lines, machine_line(result["machine"])]


def plot_ladder(models: Mapping[str, Sequence[dict]], path: Path) -> None:
    """Draw two panels per model: speed over the first rung's, peak memory in GiB. Raises ConfigError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from llmscale.report.save_figure import save_figure

    most = max(len(rows) for rows in models.values())
    figure, axes = pyplot.subplots(
        len(models), 2, figsize=(12, 0.36 * most * len(models) + 1.6), sharey="row", squeeze=False, layout="constrained"
    )
    for (speed, memory), (name, rows) in zip(axes, models.items(), strict=True):
        places = range(len(rows))
        speed.set_yticks(places, [row["rung"] for row in rows])
        speed.invert_yaxis()
        speed.set_title(f"{name}: speed, first rung = 1")
        for place, row in zip(places, rows, strict=True):
            draw_speed(speed, place, row)
        draw_memory(memory, rows)
        speed.margins(x=0.12)
        memory.set_title("peak memory of a rank, GiB")
    save_figure(figure, path)


def draw_speed(axis, place: int, row: dict) -> None:
    if "speed" not in row:
        axis.text(0.02, place, "not on this machine" if "not_here" in row else "failed", va="center", color="gray")
        return
    value = row["speed"]
    around = [[value["median"] - value["min"]], [value["max"] - value["median"]]]
    axis.barh(place, value["median"], color="tab:blue", xerr=around, ecolor="lightgray")
    axis.text(value["max"], place, f" {value['median']:.2f}", va="center", fontsize=8)


def draw_memory(axis, rows: Sequence[dict]) -> None:
    """Draw the memory measured here and the memory counted for a GPU by the dry run."""
    batch = next((row["dry_run"]["batch"] for row in rows if "batch" in row["dry_run"]), None)
    for offset, color, label, values in (
        (-0.2, "tab:orange", "measured here, at this run's batch", [row.get("memory_bytes") for row in rows]),
        (0.2, "tab:green", f"a GPU's by the dry run, batch {batch}", [row["dry_run"].get("bytes") for row in rows]),
    ):
        sizes_at = [(place, value / GIB) for place, value in enumerate(values) if value]
        if sizes_at:
            places, sizes = zip(*sizes_at, strict=True)
            bars = axis.barh([place + offset for place in places], sizes, height=0.38, color=color, label=label)
            axis.bar_label(bars, fmt=" %.2f", fontsize=7)
    axis.margins(x=0.12)
    axis.legend(loc="lower right")
