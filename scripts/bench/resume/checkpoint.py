"""Time saves and resumes beside torch's DCP and DeepSpeed's save, load and universal conversion. Linux.

    python -m scripts.bench.resume.checkpoint

At each ZeRO stage the first of --worlds saves and every one resumes. DeepSpeed's checkpoint loads at the same number of
ranks by load_checkpoint, at another by ds_to_universal and then load_checkpoint. Ours is also resumed at W ranks from a
checkpoint of W ranks: the ratio to it is what a change of size costs. DCP gets the same tensors by its own async_save
and load, with files synced; it verifies nothing, and stores no state beside the tensors.

Every save and load happens in a fork with a fresh engine, repeated --rounds times in alternating order. Every load is
checked: sums of weights and moments must equal the saved ones. `held up` is how long a step waits for a save; the save
ends when the files are hashed, synced and renamed. A resume includes the verification of all hashes. DeepSpeed's save
does not sync, so a sync of its files is timed separately.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from scripts.bench.harness import (
    Job,
    Orders,
    describe_circumstances,
    describe_machine,
    folder_bytes,
    free_port,
    machine_line,
    median_and_range,
    output_file,
    peak_bytes,
    prepare_small_text,
    python_environment,
    save_result,
    show_range,
    whole_number,
)

#: Measurements by name: "save ours", "resume ours 2 to 1", ...
Taken = dict[str, list[dict[str, float]]]
SETTINGS = ("stages", "worlds", "layers", "width", "precision", "rounds")


def main() -> int:
    args = parse_arguments()
    if args.convert:
        run_conversion(*args.convert)
        return 0
    if args.rank_job:
        run_rank_job(args)
        return 0
    # SIGTERM ends the ranks and removes what was written, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine = describe_machine()
    stages = {}
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.scratch) as scratch:
        data = prepare_small_text(Path(scratch), 64)
        for stage in args.stages:
            folder = Path(scratch) / f"zero{stage}"
            folder.mkdir()
            stages[f"zero{stage}"] = measure_stage(args, stage, folder, data)
    result = {**describe_circumstances(machine, args, SETTINGS), "stages": stages}
    print(format_result(args, result))
    save_result(args.json, result)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser.add_argument("--stages", type=numbers, default=[2, 3], help="ZeRO stages (default: 2,3)")
    parser.add_argument("--worlds", type=numbers, default=[2, 1, 4], help="the first one saves (default: 2,1,4)")
    parser.add_argument("--layers", type=whole_number, default=8, help="default: 8")
    parser.add_argument("--width", type=whole_number, default=640, help="heads are 64 wide (default: 640)")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"], help="default: bf16")
    parser.add_argument("--rounds", type=whole_number, default=3, help="default: 3")
    parser.add_argument("--scratch", type=Path, help="where the checkpoints are written; default: the temporary folder")
    parser.add_argument("--json", type=output_file, help="write the raw measurements to this file")
    parser.add_argument("--rank-job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--convert", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_stage(args: argparse.Namespace, stage: int, folder: Path, data: Path) -> dict[str, object]:
    """Run all rounds of a stage; return its parameters and measurements."""
    saver, *_ = args.worlds
    jobs: dict[int, Job] = {}
    taken: Taken = {}
    try:
        for world in args.worlds:
            options = ["--rank-job", str(folder), "--data", str(data), "--stages", str(stage)]
            options += ["--layers", str(args.layers), "--width", str(args.width), "--precision", args.precision]
            jobs[world] = Job(__spec__.name, options, world, threads=1, log=folder / f"world-{world}.log")
        for world, job in jobs.items():
            if world != saver:
                job.order(f"{free_port()} save ours")
        for number in range(args.rounds):
            one_round(jobs, saver, folder, number, taken)
            print(f"zero{stage}: round {number + 1}/{args.rounds}", file=sys.stderr, flush=True)
        for job in jobs.values():
            job.finish()
    finally:
        for job in jobs.values():
            job.kill()
    parameters = [values.pop("parameters") for values in taken["save ours"]]
    return {"parameters": parameters[0], "measurements": taken}


def one_round(jobs: dict[int, Job], saver: int, folder: Path, number: int, taken: Taken) -> None:
    """Save both ways, convert, resume in every way. The order alternates from round to round."""
    direction = 1 if number % 2 == 0 else -1

    def take(name: str, values: dict[str, float]) -> None:
        taken.setdefault(name, []).append(values)

    for whose in ("ours", "dcp", "deepspeed")[::direction]:
        take(f"save {whose}", worst(jobs[saver].order(f"{free_port()} save {whose}")))
    take("convert", convert(folder / "deepspeed", folder / "universal"))
    for world, job in jobs.items():
        sources = [
            ("ours", saver),
            ("ours", world),
            ("dcp", saver),
            ("deepspeed" if world == saver else "universal", saver),
        ]
        for whose, source in list(dict.fromkeys(sources))[::direction]:
            answers = job.order(f"{free_port()} resume {whose} {source}")
            take(f"resume {whose} {source} to {world}", worst(answers))


def worst(answers: list[dict]) -> dict[str, float]:
    """Return each number of the rank where it is largest."""
    return {key: max(answer[key] for answer in answers) for key in answers[0]}


def convert(source: Path, target: Path) -> dict[str, float]:
    """Convert as a user of DeepSpeed does; return seconds of the command and of its work, and its disk space."""
    for old in (target, target.parent / "latest_universal"):
        subprocess.run(["rm", "-rf", str(old)], check=True)
    began, peak_bytes = time.perf_counter(), 0
    command = [sys.executable, "-m", __spec__.name, "--convert", str(source / "step"), str(target)]
    environment = python_environment(OMP_NUM_THREADS="1")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        outputs: list[str] = []
        reader = threading.Thread(target=lambda: outputs.extend(process.communicate()))
        reader.start()
        while reader.is_alive():
            peak_bytes = max(peak_bytes, folder_bytes(target))
            reader.join(0.02)
    if process.returncode:
        raise SystemExit(f"the conversion failed (exit code {process.returncode}):\n{outputs[1][-4000:]}")
    measured = json.loads(outputs[0].splitlines()[-1])
    final = folder_bytes(target)
    return {"command_s": time.perf_counter() - began, "bytes": final, "most_bytes": max(peak_bytes, final), **measured}


def run_conversion(source: str, target: str) -> None:
    """Convert in this process; the clock starts after all imports."""
    from deepspeed.checkpoint import ds_to_universal

    sys.argv = ["ds_to_universal", "--input_folder", source, "--output_folder", target, "--inject_missing_state"]
    began = time.perf_counter()
    ds_to_universal.main(ds_to_universal.parse_arguments())
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "peak_rss_bytes": peak_bytes()}))


def run_rank_job(args: argparse.Namespace) -> None:
    """Execute orders as one rank, each in a fork.

    A fork starts without engine and threads, and frees all its memory: DeepSpeed does not release a stage-3 engine.
    """
    orders = Orders()
    from scripts.bench.resume.checkpoint_rank import CheckpointRank

    while order := orders.wait():
        port, *task = order.split()
        child = os.fork()
        if child:
            if os.waitpid(child, 0)[1]:
                raise SystemExit(f"'{order}' failed")
            continue
        status = 1
        try:
            os.environ["MASTER_PORT"] = port
            rank = CheckpointRank(args.rank_job, args.data, args.stages[0], args.layers, args.width, args.precision)
            orders.answer(rank.obey(task))
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)


def format_result(args: argparse.Namespace, result: dict) -> str:
    saver, *others = args.worlds
    lines = []
    for stage, result_of in result["stages"].items():

        def median(name: str, key: str = "seconds", taken: Taken = result_of["measurements"]) -> float:
            return statistics.median(values[key] for values in taken[name])

        def spread(name: str, taken: Taken = result_of["measurements"]) -> str:
            peak = max(values["peak_rss_bytes"] for values in taken[name]) / 2**20
            return f"{seconds(name)}, largest process {peak:,.0f} MiB"

        def seconds(name: str, key: str = "seconds", taken: Taken = result_of["measurements"]) -> str:
            parts = show_range(median_and_range(values[key] for values in taken[name])).partition(" ")
            return f"{parts[0]:>6} s {parts[2]}"

        lines.append(f"{stage} x{saver}, {result_of['parameters'] / 1e6:.1f}M parameters, {args.precision}")
        lines.append(
            f"  save ours        {spread('save ours')}; training held up for {seconds('save ours', 'held_s').strip()}; "
            f"{median('save ours', 'bytes') / 2**20:,.0f} MiB on disk"
        )
        lines.append(
            f"  save DCP         {spread('save dcp')}; training held up for {seconds('save dcp', 'held_s').strip()}; "
            f"{median('save dcp', 'bytes') / 2**20:,.0f} MiB on disk"
        )
        lines.append(
            f"  save DeepSpeed   {spread('save deepspeed')}, all held up, + "
            f"{seconds('save deepspeed', 'sync_s').strip()} to sync; "
            f"{median('save deepspeed', 'bytes') / 2**20:,.0f} MiB on disk"
        )
        lines.append(f"  resume at the same {saver} ranks")
        lines.append(f"    ours           {spread(f'resume ours {saver} to {saver}')}")
        lines.append(f"    DCP            {spread(f'resume dcp {saver} to {saver}')}")
        lines.append(f"    DeepSpeed      {spread(f'resume deepspeed {saver} to {saver}')}")
        for world in others:
            change = median(f"resume ours {saver} to {world}")
            same = median(f"resume ours {world} to {world}")
            ratio = change / median(f"resume ours {saver} to {saver}")
            theirs = median("convert") + median(f"resume universal {saver} to {world}")
            lines.append(f"  resume at {world} ranks what {saver} saved")
            lines.append(f"    ours           {spread(f'resume ours {saver} to {world}')}")
            lines.append(
                f"                   {change / same:.2f} x the resume of what {world} saved ({same:.2f} s), "
                f"{ratio:.2f} x the resume at {saver} ranks; no extra disk"
            )
            lines.append(f"    DCP            {spread(f'resume dcp {saver} to {world}')}")
            lines.append(f"    DeepSpeed      conversion {spread('convert')}")
            lines.append(f"                   + load {spread(f'resume universal {saver} to {world}')}")
            lines.append(
                f"                   = {theirs:.2f} s, {theirs / change:.1f} x ours; extra disk "
                f"{median('convert', 'bytes') / 2**20:,.0f} MiB, {median('convert', 'most_bytes') / 2**20:,.0f} MiB "
                "while it converts"
            )
    lines += ["medians (smallest-largest)", machine_line(result["machine"])]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
