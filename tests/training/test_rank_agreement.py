"""Ranks that were started differently refuse to train, each for the same reason; those that only look different train.

Run as a script, this file is one of two ranks: for each case on its command line it compares itself with the other.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

import pytest

from llmscale.data.shards.manifest import load_manifest
from llmscale.data.shards.verify_shards import hash_file
from llmscale.errors import ConfigError, DataError, LlmscaleError
from llmscale.training.rank_agreement import Section, describe_differences, describe_ranks, find_differences
from tests.conftest import REPOSITORY, run_ranks

#: What rank 1 is given beside rank 0's flags, and what the error then says.
DIFFERENT = {
    "lr": (["--lr", "0.0006"], "configuration: lr is 0.001 on rank 0, 0.0006 on rank 1"),
    "steps": (["--steps", "20"], "steps is 10 on rank 0, 20 on rank 1"),
    "validation": (["--val-every", "5"], "val_every is 0 on rank 0, 5 on rank 1"),
    "seed": (["--seed", "5"], "seed is 1337 on rank 0, 5 on rank 1"),
    "order": (["--no-shuffle"], "shuffle is true on rank 0, false on rank 1"),
    "micro-batch": (["--micro-batch-size", "2"], "micro_batch_size is 4 on rank 0, 2 on rank 1"),
    "global batch": (["--global-batch-size", "16"], "global_batch_size is 8 on rank 0, 16 on rank 1"),
    "stage": (["--ds", "ds_configs/zero3.json"], "zero_optimization.stage is 2 on rank 0, 3 on rank 1"),
    "precision": (["--precision", "fp32"], "precision is bf16 on rank 0, fp32 on rank 1"),
    "checkpointing": (["--activation-checkpointing", "full"], "activation_checkpointing is none on rank 0, full on"),
    "resume": (["--resume", "none"], "resume is auto on rank 0, none on rank 1"),
    "one token": (["--data", "{changed}"], "dataset: fingerprint is"),
    "sources": (["SOURCES"], "sources: training/session.py is"),
    "version": (["VERSION"], "versions: numpy is "),
    "NCCL": (["NCCL"], "environment: NCCL_ALGO is not set on rank 0, Tree on rank 1"),
}
#: What may differ, because it comes to the same.
ALIKE = {
    "nothing": [],
    "path of the set": ["--data", "{copy}"],
    "path of the ds_config": ["--ds", "{ds}"],
    "workers": ["--num-workers", "1"],
    "tokens for steps": ["--tokens", str(10 * 8 * 32)],
    "tokens for sequences": ["--global-batch-tokens", str(8 * 32)],
    "the default, said": ["--gradient-clipping", "1.0"],
}
FLAGS = {"--steps": "10", "--lr": "0.001", "--global-batch-size": "8"}


def change_a_token(folder: Path) -> None:
    """One token of the training text, with every hash that vouches for it signed anew."""
    manifest = load_manifest(folder)
    shard = folder / "train" / manifest.splits["train"].shards[0].name
    contents = bytearray(shard.read_bytes())
    contents[-40] ^= 1
    shard.write_bytes(contents)
    algorithm = manifest.hash_algorithm
    index = json.loads((folder / "train" / "index.json").read_text())
    index["shards"][0]["raw_data"]["hashes"][algorithm] = hash_file(shard, algorithm)
    (folder / "train" / "index.json").write_text(json.dumps(index))
    split = manifest.splits["train"]
    first = dataclasses.replace(split.shards[0], hash=hash_file(shard, algorithm))
    splits = {**manifest.splits, "train": dataclasses.replace(split, shards=(first, *split.shards[1:]))}
    (folder / "manifest.json").write_text(dataclasses.replace(manifest, splits=splits).to_json())
    assert load_manifest(folder).fingerprint != manifest.fingerprint


@pytest.fixture(scope="module")
def places(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("places")
    for name in ("copy", "changed"):
        shutil.copytree(tiny_set, folder / name)
    change_a_token(folder / "changed")
    shutil.copy(REPOSITORY / "ds_configs" / "zero2.json", folder / "ds.json")
    shutil.copytree(REPOSITORY / "llmscale", folder / "llmscale", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "llmscale" / "training" / "session.py").open("a") as file:
        file.write("# another version\n")
    return {"copy": str(folder / "copy"), "changed": str(folder / "changed"), "ds": str(folder / "ds.json")} | {
        "set": str(tiny_set),
        "sources": str(folder / "llmscale" / "__init__.py"),
    }


def test_ranks_that_differ_do_not_train_together(ranks: Callable, places: dict[str, str]) -> None:
    job = ranks([__file__, json.dumps(places)], 2)
    outputs = job.wait()
    assert job.exit_codes == [0, 0], outputs
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert first == second, "every rank says the same"
    assert first.keys() == {*DIFFERENT, *ALIKE}
    for name in ALIKE:
        assert first[name] is None, (name, first[name])
    for name, (_, words) in DIFFERENT.items():
        assert words in str(first[name]), (name, first[name])
        assert first[name].startswith("DataError" if name == "one token" else "ConfigError")
        assert len(first[name]) < 1000


def test_train_py_refuses_and_leaves_nothing_behind(train_command: Callable, tmp_path: Path) -> None:
    """The class's last example, which used to hang: another number of steps."""
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import os, runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.argv[sys.argv.index('--steps') + 1] = '7'\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    output = run_ranks([str(wrapper), *train_command("--steps", "5")], 2, expect=2)
    assert "steps is 5 on rank 0, 7 on rank 1" in output
    assert len([line for line in output.splitlines() if "error" in line]) == 1
    assert not (tmp_path / "run").exists()


def one_rank(places: dict[str, str]) -> dict[str, str | None]:
    """What this rank hears in each case; rank 1 is the one that differs."""
    import llmscale
    from llmscale.config.run_arguments import parse_run_config
    from llmscale.engine.process_group import join_world
    from llmscale.errors import LlmscaleError
    from llmscale.training import rank_agreement
    from llmscale.training.run_folder import library_versions
    from llmscale.training.start import prepare_start

    world, versions = join_world(), library_versions()
    heard: dict[str, str | None] = {}
    for name, words in {**{key: case[0] for key, case in DIFFERENT.items()}, **ALIKE}.items():
        own = [word.format(**places) for word in words] if world.rank else []
        fixed = {**FLAGS, "--data": places["set"], "--run": "nowhere", "--model": "tiny-1m", "--n-layer": "2"}
        fixed |= {"--n-head": "2", "--n-embd": "32", "--log-every": "1", "--val-every": "0", "--num-workers": "0"}
        for flag, replaced in (("--tokens", "--steps"), ("--global-batch-tokens", "--global-batch-size")):
            if flag in own:
                del fixed[replaced]
        patches = {
            "SOURCES": mock.patch.object(llmscale, "__file__", places["sources"]),
            "VERSION": mock.patch.object(rank_agreement, "library_versions", lambda: {**versions, "numpy": "1.0"}),
            "NCCL": mock.patch.dict(os.environ, {"NCCL_ALGO": "Tree"}),
        }
        flags = [word for word in own if word not in patches]
        fixed = {flag: value for flag, value in fixed.items() if flag not in flags}
        run = prepare_start(parse_run_config([word for pair in fixed.items() for word in pair] + flags), 2)
        with patches.get(own[0] if own else "", mock.patch.dict(os.environ, {})):
            try:
                rank_agreement.check_ranks_agree(run.on_cpu(), world)
                heard[name] = None
            except LlmscaleError as error:
                heard[name] = f"{type(error).__name__}: {error}"
    return heard


SECTIONS = {
    "configuration": {"lr": "0.0003", "steps": "100", **{f"key_{number}": "x" for number in range(60)}},
    "dataset": {"fingerprint": "a" * 64},
    "sources": {f"module_{number}.py": "b" * 64 for number in range(200)},
}


def changed(section: str, **values: str) -> dict[str, Section]:
    return {**SECTIONS, section: {**SECTIONS[section], **values}}


def compare(ranks: Sequence[Mapping[str, Section]], ranks_per_host: int = 8) -> LlmscaleError:
    """What the ranks would all raise."""
    differences = [find_differences(ranks[0], sections) for sections in ranks]
    of_hosts = [(f"node-{rank // ranks_per_host}", own) for rank, own in enumerate(differences)]
    assert not find_differences(ranks[0], ranks[0]), "nothing is sent when all is well"
    return describe_differences(ranks[0], of_hosts)


def test_an_error_names_what_differs_the_values_the_ranks_and_the_host() -> None:
    error = compare([SECTIONS] * 4 + [changed("configuration", lr="0.0006")], ranks_per_host=2)
    assert isinstance(error, ConfigError)
    assert str(error).startswith(
        "the ranks were not started alike, so they cannot train together. "
        "configuration: lr is 0.0003 on ranks 0-3, 0.0006 on rank 4 (host node-2). Start every rank with"
    )


def test_only_data_is_a_data_error_and_hashes_are_short() -> None:
    other = changed("dataset", fingerprint="c" * 64)
    error = compare([SECTIONS, other])
    assert isinstance(error, DataError)
    assert "dataset: fingerprint is aaaaaaaaaaaa on rank 0, cccccccccccc on rank 1" in str(error)
    both = {**other, "sources": {**SECTIONS["sources"], "module_7.py": "d" * 64}}
    error = compare([SECTIONS, both])
    assert isinstance(error, ConfigError)
    assert "module_7.py is bbbbbbbbbbbb on rank 0, dddddddddddd on rank 1" in str(error)


def test_what_only_some_have_is_absent_on_the_others() -> None:
    shorter = {
        **SECTIONS,
        "sources": {name: value for name, value in SECTIONS["sources"].items() if name != "module_3.py"},
    }
    assert "module_3.py is bbbbbbbbbbbb on ranks 0-1, absent on rank 2" in str(compare([SECTIONS, SECTIONS, shorter]))
    assert "module_3.py is absent on ranks 0-1, bbbbbbbbbbbb on rank 2" in str(compare([shorter, shorter, SECTIONS]))


def test_a_thousand_ranks_stay_short_and_quick() -> None:
    other = changed("configuration", lr="0.1", steps="7")
    every_third = [other if rank % 3 == 0 else SECTIONS for rank in range(1000)]
    every_third[-2] = changed("sources", module_0="x" * 64)
    every_third[5] = changed("configuration", **{f"key_{number}": "y" * 500 for number in range(60)})
    began = time.process_time()
    error = compare(every_third)
    assert time.process_time() - began < 10, "seconds would be minutes at 10,000 ranks"
    assert len(str(error)) < 2000


def test_every_rank_its_own_value() -> None:
    error = compare([changed("configuration", lr=str(rank)) for rank in range(64)])
    assert "lr is 0 on rank 0, 1 on rank 1 (host node-0), 2 on rank 2 (host node-0) and 61 other values" in str(error)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8"),
        (list(range(0, 1000, 2)), "ranks 0, 2, 4, 6 and 496 more"),
    ],
)
def test_ranks_in_a_few_words(ranks: list[int], words: str) -> None:
    assert describe_ranks(ranks) == words


if __name__ == "__main__":
    sys.path[0] = str(REPOSITORY)
    print(json.dumps(one_rank(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)
