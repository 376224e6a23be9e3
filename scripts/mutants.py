"""Plant a fault in a copy of the repository and see which test finds it: `python -m scripts.mutants [WORDS]`.

Each of FAULTS would lose samples, weights or checkpoints in silence. One that no test finds is printed as SURVIVED, and
the status is 1. WORDS choose faults by parts of their names. All take about 15 minutes on 2 quiet cores.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import copy2
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
#: Seconds; a fault that lets the tests hang is found.
TIMEOUT_S = 1200


#: A file of llmscale/ and the tests that should find what is wrong in it; then faults: a name, what the file has once,
#: and what takes its place.
FAULTS = """
data/order/sample_order.py: tests/data/order
  nodes are reversed: [rows % counts.sum()] => [::-1][rows % counts.sum()]
  a skipped range begins late: moved[moved >= begin] => moved[moved > begin]
  every epoch is the first: _ids_in_epoch(epoch, positions => _ids_in_epoch(0, positions
config/batch_plan.py: tests/config/test_batch_plan.py
  fillers are not counted: self.micro_batch_size * self.micro_steps(size) * self.ranks.data_parallel_size => size
  a ramp's stage ends early: ramp.samples // (full - ramp.first) => ramp.samples // full
  sequences grow late: doublings * seen // self.samples) => doublings * seen // (self.samples + 1))
engine/random_numbers.py: tests/engine/test_train_step.py
  dropout is the same on all ranks: {seed} {step} {rank} => {seed} {step}
engine/train_step.py: tests/distributed/test_any_number_of_ranks.py
  a filler weighs as much as a sample: loss = loss * weight => pass
  a filler counts in experts' loads: model.routing = torch.zeros_like(model.routing) => pass
  routers are balanced by one rank's load: dist.all_reduce(loads) => pass
engine/train_step.py: tests/distributed/test_batch_ramp.py
  accumulation is out of step after a ramp: engine.micro_steps = 0 => pass
engine/zero_shards.py: tests/distributed/test_zero_state.py tests/distributed/test_resume.py
  Adam counts the engine's start: state["step"].zero_() => pass
  16-bit weights stay those of the start: zero.update_lp_params() => pass
engine/zero_shards.py: tests/training/test_loss_spikes.py
  persistent parameters stay whole: _partition_persistent_parameters(engine) => pass
engine/zero_shards.py: tests/distributed/test_hpz.py
  copies of hpZ stay those of the start: invalidate_hpz_copies(engine) => pass
checkpoint/inventory.py: tests/checkpoint/test_inventory.py tests/checkpoint/test_save.py
  one less is kept: if num_complete < keep_last: => if num_complete < keep_last - 1:
  the worst is the best: return min(comparable => return max(comparable
  pinned ones expire: checkpoint.path.name not in pinned and => True and
  the best expires: and checkpoint is not best: => and True:
  going back begins no history: History(number, (*manifest.history.branches, here)) => listing.history
  abandoned ones are overwritten: set_aside_existing(final) => pass
  latest names another run's: if is_of_run(checkpoint, run): => if True:
checkpoint/load.py: tests/checkpoint/test_load.py tests/distributed/test_zero_state.py tests/distributed/test_history.py
  surplus tensors pass: surplus = sorted(set(stored) - set(wanted)) => surplus = []
  optimizers' scalars are forgotten: set_group_scalars(engine, scalars) => pass
checkpoint/store.py: tests/checkpoint tests/distributed/test_zero_state.py tests/distributed/test_history.py
  damage passes: next((finding for finding in findings if finding), None) => None
memory/layers.py: tests/memory/test_cells.py
  frozen weights keep their input: is_trained = name not in p.frozen => is_trained = True
memory/zero_stages.py: tests/memory/test_cells.py
  earlier micro-steps leave nothing: states.step = largest_addition([states.step, states.before]) => pass
memory/zero_stage1.py: tests/memory/test_cells.py
  a rank's large gradients stay: if piece.owned and piece.elements > sharding.bucket_elements => if False
memory/states.py: tests/memory/test_cells.py
  copies of frozen ones do not last: tensor.index for tensor in tensors.frozen_tensors} => 0 for _ in ()}
data/clean/filters.py: tests/data/clean/test_filters.py
  a frequent n-gram has no spaces: ends[begin + n] - ends[begin] + n - 1) => ends[begin + n] - ends[begin])
  a copy is a word short: characters += ends[place + n] - ends[place] => characters += ends[place + n - 1] - ends[place]
  the end of a long text is not judged: text[-_PIECE_CHARACTERS:])) => text[:_PIECE_CHARACTERS]))
planning/law_fit.py: tests/planning/test_law_fit.py
  a law's intervals lack Student's t: spread = self.residuals * student_ratio(num_runs - 5) => spread = self.residuals
  a fit's own freedom is not counted: np.sqrt(n / max(1, n - num_fitted)) => 1.0
  parabolas have one coefficient: num_fitted = 3 * len(flops) => num_fitted = len(flops)
planning/search.py: tests/planning/test_search.py
  whole tensors are locked in parts: cluster.world_size if step.zero_stage == 3 else 1 => cluster.world_size
  a node keeps every copy: else 1 / cluster.num_nodes => else 1
report/history.py: tests/report/test_run_history.py
  overlapping steps count twice: bisect_right(other.steps, self.steps[-1]) => 0
  overlapping events count twice: bisect_left(other.others, self.others[-1][0], key=_step_of) => 0
  a restart forgets nothing: del self.others[bisect_right(self.others, last_step, key=_step_of) :] => pass
evaluate/scoring.py: tests/evaluate/test_scoring.py
  a long context loses its end: [-(seq_len + 1) :] => [: seq_len + 1]
  windows score a token twice: seq_len - 1 : end]), end - start)) => seq_len - 1 : end]), end - start + 1))
evaluate/tasks.py: tests/evaluate/test_tasks.py
  an item takes its neighbour's scores: scores[start : start + count]) => scores[:count])
"""


class Fault(NamedTuple):
    """One change of a file, and pytest's arguments to find it."""

    path: str
    tests: str
    name: str
    old: str
    new: str


def list_faults() -> Iterator[Fault]:
    """Yield every fault of FAULTS."""
    path = tests = ""
    for line in FAULTS.strip().splitlines():
        name, _, rest = line.partition(": ")
        if line[0] == " ":
            old, _, new = rest.partition(" => ")
            yield Fault(path, tests, name.strip(), old, new)
        else:
            path, tests = name, rest


def copy_repository(to: Path) -> None:
    """Copy the files that git tracks or would, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (REPOSITORY / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            copy2(REPOSITORY / name, to / name, follow_symlinks=False)


def find_failure(copy: Path, tests: str) -> str | None:
    """Return the first of the tests that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", *tests.split()]
    try:
        ended = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "a time limit"
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    if ended.returncode and not failures:
        sys.exit(f"pytest ended with status {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return failures[0] if failures else None


def main(wanted: list[str]) -> int:
    """Return 1 when a fault survives its tests."""
    survived = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_repository(Path(folder))
        for fault in list_faults():
            if wanted and not any(word in fault.name for word in wanted):
                continue
            file = Path(folder) / "llmscale" / fault.path
            text = file.read_text(encoding="utf-8")
            if text.count(fault.old) != 1:
                sys.exit(f"{fault.name}: {fault.path} has {fault.old!r} {text.count(fault.old)} times, not once.")
            start = time.monotonic()
            file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
            failure = find_failure(Path(folder), fault.tests)
            file.write_text(text, encoding="utf-8")
            survived += failure is None
            verdict = f"found by {failure}" if failure else "SURVIVED"
            print(f"{fault.path}: {fault.name}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
