"""The shipped ds_configs and hostfiles: one idea each, copies do not drift, DeepSpeed reads them as meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmscale.config.batch_plan import BatchPlan, ParallelLayout
from llmscale.config.deepspeed.resolve import read_ds_config, resolve_ds_config, without_pinned_memory
from tests.config.deepspeed.test_resolve import Size

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "ds_configs"
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))

ABSENT = None
STAGE = "zero_optimization.stage"
OPTIMIZER_DEVICE = "zero_optimization.offload_optimizer.device"
PARAM_DEVICE = "zero_optimization.offload_param.device"
CPU_CHECKPOINTING = "activation_checkpointing.cpu_checkpointing"
DYNAMIC_FP16: dict[str, object] = {
    "bf16.enabled": ABSENT,
    "fp16.enabled": True,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
}

#: file -> (the file it starts from, what it changes). zero0 is the root.
DIFFERENCES: dict[str, tuple[str, dict[str, object]]] = {
    "zero1": ("zero0", {STAGE: 1}),
    "zero2": ("zero1", {STAGE: 2}),
    "zero3": ("zero2", {STAGE: 3}),
    "zero2_offload": ("zero2", {OPTIMIZER_DEVICE: "cpu"}),
    "zero3_offload": ("zero3", {OPTIMIZER_DEVICE: "cpu", PARAM_DEVICE: "cpu"}),
    "zero3_nvme": (
        "zero3_offload",
        {
            OPTIMIZER_DEVICE: "nvme",
            PARAM_DEVICE: "nvme",
            "zero_optimization.offload_optimizer.nvme_path": "/local_nvme",
            "zero_optimization.offload_param.nvme_path": "/local_nvme",
        },
    ),
    "zero1_fp16": ("zero1", DYNAMIC_FP16),
    "zero2_fp16": ("zero2", DYNAMIC_FP16),
    "zero3_fp16": ("zero3", DYNAMIC_FP16),
    "zero2_ckpt": ("zero2", {CPU_CHECKPOINTING: False}),
    "zero3_ckpt": ("zero3", {CPU_CHECKPOINTING: False}),
    "zero3_ckpt_cpu": ("zero3_ckpt", {CPU_CHECKPOINTING: True}),
}


def flat(config: dict[str, object], prefix: str = "") -> dict[str, object]:
    leaves: dict[str, object] = {}
    for key, value in config.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def load(name: str) -> dict[str, object]:
    return flat(json.loads((FOLDER / f"{name}.json").read_text()))


def resolve(name: str, has_gpu: bool = False) -> dict[str, object]:
    plan = BatchPlan(6, 2, 3, ParallelLayout(1), seq_len=16)
    resolved = resolve_ds_config(read_ds_config(FOLDER / f"{name}.json"), Size(64, 100_001), plan)
    return resolved if has_gpu else without_pinned_memory(resolved)


def test_every_file_states_its_idea() -> None:
    assert set(NAMES) == {"zero0", *DIFFERENCES}
    assert load("zero0") == {STAGE: 0, "bf16.enabled": "auto"}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_file_differs_from_its_base_only_in_its_idea(name: str) -> None:
    base, changes = DIFFERENCES[name]
    expected = {key: value for key, value in (load(base) | changes).items() if value is not ABSENT}
    assert load(name) == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_explains_every_file(name: str) -> None:
    assert f"`{name}.json`" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_file_has_no_batch_size_and_nothing_without_effect(name: str) -> None:
    config = read_ds_config(FOLDER / f"{name}.json")
    assert config.warnings == ()
    assert not any("batch" in key or "accumulation" in key for key in load(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_name_says_what_the_file_does(name: str) -> None:
    config = read_ds_config(FOLDER / f"{name}.json")
    assert config.zero_stage == int(name[4])
    assert config.precision == ("fp16" if "fp16" in name else "bf16")
    device = "nvme" if "nvme" in name else "cpu" if "offload" in name else "none"
    assert config.keys.offload_optimizer_device == device
    assert config.keys.offload_param_device == (device if config.zero_stage == 3 else "none")
    assert config.checkpointing == ("full" if "ckpt" in name else "none")
    assert config.keys.cpu_checkpointing == name.endswith("ckpt_cpu")


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_reads_the_resolved_file_as_meant(name: str) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    ours = read_ds_config(FOLDER / f"{name}.json")
    theirs = DeepSpeedConfig(resolve(name))
    zero = theirs.zero_config
    assert theirs.zero_optimization_stage == ours.zero_stage
    assert theirs.bfloat16_config.enabled == (ours.precision == "bf16")
    assert theirs.float16_config.enabled == (ours.precision == "fp16")
    assert not theirs.torch_autocast_enabled
    assert (zero.offload_optimizer.device if zero.offload_optimizer else "none") == ours.keys.offload_optimizer_device
    assert (zero.offload_param.device if zero.offload_param else "none") == ours.keys.offload_param_device
    assert theirs.activation_checkpointing_config.cpu_checkpointing == ours.keys.cpu_checkpointing
    batch = (
        theirs.train_micro_batch_size_per_gpu,
        theirs.gradient_accumulation_steps,
        theirs.train_batch_size,
    )
    assert batch == (2, 3, 6)
    assert theirs.gradient_clipping == 1.0
    assert theirs.zero_allow_untested_optimizer
    assert not theirs.zero_force_ds_cpu_optimizer


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("1x1", {"localhost": 1}),
        ("4xa100", {"localhost": 4}),
        ("8xa100", {"localhost": 8}),
        ("2x8xa100", {"node-0": 8, "node-1": 8}),
    ],
)
def test_deepspeeds_launcher_parses_the_hostfiles(name: str, hosts: dict[str, int]) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.launcher.runner import fetch_hostfile

    assert dict(fetch_hostfile(str(ROOT / "hostfiles" / name))) == hosts
    assert f"`{name}`" in (ROOT / "hostfiles" / "README.md").read_text()
