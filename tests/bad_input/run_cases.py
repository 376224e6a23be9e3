"""Runs command lines as their programs would, each in a process of its own that is forked after the imports.

stdin: JSON, a list of {"program": "train" | "llmscale", "argv": [...], "env": {...}, "closed": [fd, ...], "out": PATH}.
stdout: JSON, for each the exit status (-N: ended by signal N; null: it ran into the time limit), stdout, stderr, the
seconds it took, whether torch was imported, and the paths below the current folder that it made, changed or removed.

train.py ends with status TORCH_STATUS where it would import torch: everything that it was told was accepted.
"""

from __future__ import annotations

import gc
import importlib.abc
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from llmscale.config.run_flags import describe_keys

LATE_IMPORTS = (
    "llmscale.cli.estimate_answers",
    "llmscale.cli.plan_answers",
    "llmscale.data.prepare.prepare_set",
    "llmscale.data.prepare.sources.open_source",
    "llmscale.data.tokenizers.train_tokenizer",
    "tarfile",
    "grp",
    "pwd",
    "llmscale.data.tokenizers.load_tokenizer",
    "llmscale.evaluate.model_source",
    "llmscale.cluster.doctor.on_ranks",
)
TORCH_STATUS = 77
MEMORY_BYTES = 8 << 30
FILE_BYTES = 256 << 20
#: A command that takes longer hangs.
TIME_LIMIT_S = 300.0
#: Launchers' variables of whoever runs the tests.
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class _NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name.split(".")[0] in ("torch", "deepspeed", "streaming"):
            os._exit(TORCH_STATUS)


def _tree(folder: Path) -> dict[str, tuple[int, int]]:
    actual = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        # A folder's own time says what its entries say too.
        actual[str(path.relative_to(folder))] = (0, 0) if path.is_dir() else (status.st_size, status.st_mtime_ns)
    return actual


def _child(case: dict, scratch: Path) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    for name in (*LAUNCHER_VARIABLES, "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(case.get("env", {}))
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        path = case["out"] if descriptor == 1 and case.get("out") else scratch / name
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in case.get("closed", ()):
        os.close(descriptor)
    program = case["program"]
    sys.argv = [program, *case["argv"]]
    try:
        if program == "train":
            sys.meta_path.insert(0, _NoTorch())
            from llmscale.train import main
        else:
            from llmscale.cli.main import main
        status = main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    (scratch / "torch").write_text(str(int("torch" in sys.modules)))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def run_case(case: dict, folder: Path, before: dict[str, tuple[int, int]]) -> dict:
    """Run it in `folder`, which has `before` in it, and remove what it made."""
    scratch = Path(tempfile.mkdtemp(prefix="case-"))
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        try:
            _child(case, scratch)
        except BaseException:
            import traceback

            os.write(2, traceback.format_exc().encode())
            os._exit(1)
    status = None
    while time.monotonic() - began < case.get("time_limit_s", TIME_LIMIT_S):
        done, ended = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(ended)
            break
        time.sleep(0.002)
    else:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    after = _tree(folder)
    written = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in sorted(after.keys() - before.keys(), reverse=True):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    texts = {
        name: (scratch / name).read_text(errors="replace") if (scratch / name).exists() else ""
        for name in ("stdout", "stderr", "torch")
    }
    shutil.rmtree(scratch)
    return {
        **{name: text for name, text in texts.items() if name != "torch"},
        "status": status,
        "torch": texts["torch"] == "1",
        "seconds": time.monotonic() - began,
        "written": written,
    }


def main() -> None:
    cases = json.load(sys.stdin)
    import llmscale.cli.main
    import llmscale.train

    # Whatever a command may import and read at its start, once for all of them.
    for name in (*(f"llmscale.cli.{name}" for name in llmscale.cli.main.COMMANDS), *LATE_IMPORTS):
        importlib.import_module(name)
    describe_keys()
    gc.collect()
    gc.freeze()
    answers, folder = [], Path.cwd()
    before = _tree(folder)
    for case in cases:
        answers.append(run_case(case, folder, before))
        if answers[-1]["written"]:
            before = _tree(folder)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
