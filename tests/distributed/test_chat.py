"""The loss of conversations is the mean over the targets of the global batch, however the batch is divided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmscale.config.run_arguments import parse_run_config
from llmscale.data.shards.manifest import load_manifest
from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.validation import validation_sample_ids
from llmscale.model.gpt import GPT
from llmscale.training.start import Start, prepare_start
from scripts.bench.resume.samples import read_samples
from tests.conftest import TRAIN, build_train_command, forget_after, words
from tests.conversations import conversations_in, prepare, prepare_conversations, write_conversations, write_words
from tests.distributed.test_any_number_of_ranks import values_of
from tests.distributed.test_document_mask import plain_optimizer
from tests.runs_in_turn import train_in_turn

STEPS = 4
FLAGS = words(f"--precision fp32 --steps {STEPS} --lr 1e-2 --val-every {STEPS} --check-every 1")
#: ds_config and flags of runs by name, each with its ranks. Batches have 10 rows: three ranks need fillers.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "a row at a time": (1, ("zero1", "--micro-batch-size", "1")),
    "two ranks": (2, ("zero2", "--micro-batch-size", "1")),
    "three ranks": (3, ("zero3", "--micro-batch-size", "2")),
    "three ranks at stage 0": (3, ("zero0", "--micro-batch-size", "1")),
    "divided sequences": (2, ("zero2", "--micro-batch-size", "5", "--sequence-parallel-size", "2")),
    "divided sequences at stage 3": (2, ("zero3", "--micro-batch-size", "2", "--sequence-parallel-size", "2")),
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of packed conversations, with its JSON lines and other text beside it."""
    folder = tmp_path_factory.mktemp("chats")
    write_conversations(folder / "chats.jsonl")
    write_words(folder / "words.jsonl")
    prepare_conversations(folder / "chats.jsonl", folder / "set")
    return folder / "set"


def build(data: Path, run: Path, ds_config: str, *flags: str) -> list[str]:
    return build_train_command(data, run, "--global-batch-size", "10", *FLAGS, *flags, "--ds", ds_config)


def check_equal(run: Path, reference: Path, tolerance: float = 1e-6) -> None:
    values, expected = values_of(run), values_of(reference)
    assert values == pytest.approx(expected, rel=tolerance)


def test_losses_are_those_of_a_plain_loop_over_single_conversations(chats: Path, tmp_path: Path) -> None:
    """Three ranks of rows with more and fewer targets, one of which has a filler."""
    command = build(chats, tmp_path / "run", "zero3", "--micro-batch-size", "2")
    train_in_turn([command], 3)
    run = prepare_start(parse_run_config([word for word in command if word != str(TRAIN)]), 3)
    plain, of_rows, validation = plain_losses(run, read_samples(tmp_path / "run"))
    values = values_of(tmp_path / "run")
    losses = [values["train", step, "loss"] for step in range(1, STEPS + 1)]
    assert losses == pytest.approx(plain, rel=1e-6)
    assert values["validation", STEPS, "loss"] == pytest.approx(validation, rel=1e-6)
    # The mean of the rows' means, which others compute, is another number.
    assert max(abs(a - b) for a, b in zip(losses, of_rows, strict=True)) > 1e-2


def plain_losses(run: Start, sample_ids: dict[int, np.ndarray]) -> tuple[list[float], list[float], float]:
    """Losses by step, the means of their rows' means, and the validation's loss after the last step, of torch alone."""
    assert run.resolved.shape.document_end == 256, "packed conversations do not see each other"
    model, optimizer = plain_optimizer(run)
    train, validation = (TokenShards(run.sets.first, split) for split in ("train", "val"))
    losses, of_rows = [], []
    for step in range(STEPS):
        rows = [sum_losses(model, row) for row in train.read(sample_ids[step]).tolist()]
        loss = sum(total for total, _ in rows) / sum(count for _, count in rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = run.resolved.schedule.learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        of_rows.append(float(np.mean([total.item() / count for total, count in rows])))
    with torch.no_grad():
        ids = validation_sample_ids(len(validation), None)
        rows = [sum_losses(model, row) for row in validation.read(ids).tolist()]
    return losses, of_rows, float(sum(total for total, _ in rows) / sum(count for _, count in rows))


def sum_losses(model: GPT, row: list[int]) -> tuple[torch.Tensor, int]:
    """Sum and number of the targets' losses in a row, a conversation at a time."""
    total, count = torch.zeros(()), 0
    for tokens, is_target in conversations_in(row):
        nats = F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none")
        total, count = total + nats[is_target[1:]].sum(), count + int(is_target[1:].sum())
    return total, count


def check_cases(data: Path, folder: Path, *flags: str) -> None:
    reference = folder / "reference"
    train_in_turn([build(data, reference, "zero0", "--micro-batch-size", "10", *flags)], 1)
    for world_size in (1, 2, 3):
        runs = {name: folder / name.replace(" ", "-") for name, case in CASES.items() if case[0] == world_size}
        train_in_turn([build(data, run, *CASES[name][1], *flags) for name, run in runs.items()], world_size)
        for run in runs.values():
            check_equal(run, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--z-loss", "1e-2"),
        ("--batch-ramp-from", "5", "--batch-ramp-tokens", "960", "--loss-chunk-tokens", "7", "--micro-batch-size", "1"),
        ("--seq-len-ramp-from", "24", "--seq-len-ramp-tokens", "1920"),
    ],
    ids=["z-loss", "ramp", "growing sequences"],
)
def test_losses_do_not_depend_on_how_the_batch_is_divided(chats: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    check_cases(chats, tmp_path, *flags)


@pytest.mark.slow
def test_experts_keep_their_own_losses(chats: Path, tmp_path: Path) -> None:
    """The balance of routers is about all tokens, so targets do not change its weight."""
    losses = {}
    for name, flags in {"targets": (), "all": ("--train-on", "all")}.items():
        prepare_conversations(chats.parent / "chats.jsonl", tmp_path / name, *flags)
        experts = ("--num-experts", "4", "--expert-width", "40", "--balance-loss", "0.02", "--micro-batch-size", "5")
        train_in_turn([build(tmp_path / name, tmp_path / f"run-{name}", "zero2", *experts)], 1)
        losses[name] = values_of(tmp_path / f"run-{name}")["train", 1, "router_loss"]
    assert losses["targets"] == pytest.approx(losses["all"], rel=1e-6)


@pytest.mark.slow
def test_a_mixture_with_text_goes_on_elsewhere(chats: Path, tmp_path: Path) -> None:
    """All tokens of text are targets, and a resume on other ranks at another stage continues alike."""
    prepare(chats.parent / "words.jsonl", tmp_path / "words")
    mix = tmp_path / "mix.yaml"
    mix.write_text(f"sets: {{chats: {chats}, words: words}}\nstages: [{{weights: {{chats: 3, words: 2}}}}]\n")
    flags = ("--micro-batch-size", "2", "--save-every", "2", "--keep-last", "9")
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train_in_turn([build(mix, straight, "zero1", *flags)], 1)
    train_in_turn([build(mix, broken, "zero2", *flags)], 2)
    check_equal(broken, straight, 2e-6)
    forget_after(broken, 2)
    train_in_turn([build(mix, broken, "zero3", *flags)], 3)
    check_equal(broken, straight, 2e-6)
    values = values_of(straight)
    chats_loss, words_loss, loss = (values["train", 1, name] for name in ("chats", "words", "loss"))
    assert chats_loss == pytest.approx(5.56, abs=0.5), "a first loss of 257 tokens, whatever the share of targets"
    assert min(chats_loss, words_loss) <= loss <= max(chats_loss, words_loss)


@pytest.mark.slow
def test_padded_rows_have_the_losses_of_packed_ones(chats: Path, tmp_path: Path) -> None:
    """The whole set in one batch: the same targets, each seen after the same tokens."""
    prepare_conversations(chats.parent / "chats.jsonl", tmp_path / "padded", "--packing", "pad")
    losses = []
    for data in (chats, tmp_path / "padded"):
        size = str(load_manifest(data).splits["train"].num_samples)
        run = tmp_path / f"of-{size}"
        train_in_turn([build(data, run, "zero0", "--global-batch-size", size, "--micro-batch-size", size)], 1)
        losses.append([value for key, value in values_of(run).items() if "loss" in key])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
