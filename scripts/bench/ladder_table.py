"""What ladder.py prints of its rows, and whether the claim is met. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ladder_rungs import MODELS, VOCAB_SIZE
from machine import show_range

#: Times the first rung's speed, and a part of its memory, on a GPU.
CLAIM = 10.0
GIB = 2**30
Row = dict


def compare_memory(rows: list[Row]) -> None:
    """Put the last row's memory in relation to the first one's."""
    first, last = rows[0], rows[-1]
    if "memory_bytes" in first and "memory_bytes" in last:
        last["memory_ratio"] = first["memory_bytes"] / last["memory_bytes"]
    if "bytes" in first["dry_run"] and "bytes" in last["dry_run"]:
        last["dry_run"]["ratio"] = first["dry_run"]["bytes"] / last["dry_run"]["bytes"]


def judge(rows: Sequence[Row], *, is_gpu: bool) -> dict[str, object]:
    """The best rung's speed and memory against the first one's, and whether that is ten times each on a GPU."""
    speed = [(row["speed"]["median"], row["rung"]) for row in rows if "speed" in row]
    processor = [(row["processor"]["median"], row["rung"]) for row in rows if row.get("processor")]
    memory = [(row["memory_ratio"], row["rung"]) for row in rows if "memory_ratio" in row]
    dry = [(row["dry_run"]["ratio"], row["rung"]) for row in rows if "ratio" in row["dry_run"]]
    return {
        name: {"times": max(found)[0], "rung": max(found)[1], "met": max(found)[0] >= CLAIM, "on": where}
        for name, found, where in (
            ("speed", speed, "this GPU, measured" if is_gpu else "this CPU, measured; a GPU: not measured"),
            ("speed by processor time", processor, "this CPU, measured; a GPU: not measured"),
            ("memory", memory, "this GPU, measured" if is_gpu else "this CPU, measured"),
            ("GPU memory by the dry run", dry, "a GPU, counted; not measured"),
        )
        if found
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
    machine = result["machine"]
    load = f"{machine['load_average'][0]} before, {machine['load_average_after'][0]} after"
    lines.append(f"{machine['cpu']}, {machine['cores']} cores, GPUs {machine['gpus'] or 'none'}; load average {load}")
    return lines
