"""Our own scores of a model are those of lm-eval's Hugging Face model on its export, item by item."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llmscale.architecture.hf_config import family_of
from llmscale.architecture.shape import GPTShape
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from llmscale.evaluate.conversation import open_template
from llmscale.evaluate.export import ExportedModel, write_model
from llmscale.evaluate.lm_eval_tasks import open_lm
from llmscale.evaluate.scoring import pair_row, rolling_rows, score_rows
from llmscale.evaluate.tasks import encode_task, load_task_files
from llmscale.evaluate.weights import open_stored
from llmscale.model.gpt import GPT
from tests import warm_start
from tests.checkpoint.written import write_tensors
from tests.conftest import REPOSITORY
from tests.evaluate.made_up_items import write_items, write_lm_eval_tasks

ROTARY = {"norm": "rmsnorm", "positions": "rotary", "gated_mlp": True, "bias": False, "activation": "silu"}


def export_random_model(shape: GPTShape, tokenizer: Tokenizer, folder: Path) -> GPT:
    """A model whose every choice is a clear one, and its export in `folder`."""
    model = GPT(shape, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    tensors = {f"master/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    checkpoint = write_tensors(folder.with_name(f"{folder.name}-checkpoint"), tensors)
    exported = ExportedModel(shape, family_of(shape), "fp32", 10**9)
    write_model(open_stored(checkpoint, shape, None), exported, tokenizer, folder, card="# card\n", overwrite=False)
    return model.eval()


def tokenizer_with_beginning(folder: Path) -> Tokenizer:
    """A byte-level BPE with `<s>` before every document."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing

    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast.train([str(REPOSITORY / "docs/data_reference.md")], trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False))  # fmt: skip
    fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[GPT, Tokenizer]]:
    folder = tmp_path_factory.mktemp("models")
    begun = tokenizer_with_beginning(folder / "tokenizer")
    assert begun.bos_tokens == (0,)
    shapes = {
        "gpt2": (GPTShape(2, 4, 48, 257, 96, activation="gelu_tanh"), ByteTokenizer()),
        "llama": (GPTShape(2, 4, 48, begun.vocab_size, 80, n_kv_head=2, tied=False, **ROTARY), begun),
    }
    return {
        str(folder / name): (export_random_model(shape, tokenizer, folder / name), tokenizer)
        for name, (shape, tokenizer) in shapes.items()
    }


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with items, and in tasks/ the YAMLs of lm-eval's tasks on them."""
    folder = tmp_path_factory.mktemp("items")
    write_items(folder)
    return folder


@pytest.fixture(scope="module")
def answers(models: dict[str, tuple[GPT, Tokenizer]], items: Path) -> dict[str, Any]:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]'")
    names = write_lm_eval_tasks(items / "tasks", items)
    done = warm_start.run(
        [sys.executable, str(REPOSITORY / "tests/evaluate/lm_eval_job.py"), *models, "--", *names],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        cwd=items,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    actual: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return actual


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_item_has_the_likelihood_that_the_run_has(
    answers: dict[str, Any], models: dict[str, tuple[GPT, Tokenizer]], name: str
) -> None:
    model, tokenizer = next(actual for folder, actual in models.items() if folder.endswith(f"/{name}"))
    seq_len = model.shape.seq_len
    samples = answers[name]["samples"]
    for task in ("hella", "choice", "likely", "rolling"):
        for arguments, responses in samples[task]:
            for given, (response,) in zip(arguments, responses, strict=True):
                if task == "rolling":
                    scores = score_rows(model, rolling_rows(tokenizer, seq_len, given[0]), batch_size=4)
                    total = math.fsum(score.log_likelihood for score in scores)
                    assert float(response) == pytest.approx(total, rel=2e-6)
                else:
                    (score,) = score_rows(model, [pair_row(tokenizer, seq_len, *given, "here")], batch_size=1)
                    assert float(response[0]) == pytest.approx(score.log_likelihood, rel=2e-6), task
                    assert str(response[1]) == str(score.is_greedy), task
    texts = {response for task in ("written", "written_on") for _, (((response,)),) in samples[task]}
    assert len(texts) > 5


def in_nats(metric: str, value: float) -> float:
    """A perplexity is exp of what is compared, and grows its rounding with it."""
    return math.log(value) if "perplexity" in metric else value


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_results_are_those_of_lm_evals_report(answers: dict[str, Any], name: str) -> None:
    results = answers[name]["results"]
    run = {task: (values, count) for task, values, count in answers[name]["run"]}
    assert run["hella"] == ({key: results["hella"][f"{key},none"] for key in ("acc", "acc_norm", "acc_bytes")}, 9)
    assert run.keys() == results.keys()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_items_from_files_have_the_results_of_lm_evals_tasks(
    answers: dict[str, Any], models: dict[str, tuple[GPT, Tokenizer]], items: Path, name: str
) -> None:
    model, tokenizer = next(actual for folder, actual in models.items() if folder.endswith(f"/{name}"))
    specs = ("hellaswag=hellaswag", "multiple_choice=choice", "likelihood=likelihood", "text=text")
    files = load_task_files(f"{kind}={items / file}.jsonl" for kind, _, file in (spec.partition("=") for spec in specs))
    tasks = [encode_task(file, tokenizer, model.shape.seq_len) for file in files]
    theirs = answers[name]["results"]
    for task, other in zip(tasks, ("hella", "choice", "likely", "rolling"), strict=True):
        values = task.values(score_rows(model, task.rows, batch_size=4))
        shared = [metric for metric in values if f"{metric},none" in theirs[other]]
        assert shared
        for metric in shared:
            expected = theirs[other][f"{metric},none"]
            assert in_nats(metric, values[metric]) == pytest.approx(in_nats(metric, expected), rel=1e-6), metric


def test_a_score_is_that_of_the_whole_logits_whatever_the_batch(models: dict[str, tuple[GPT, Tokenizer]]) -> None:
    for model, tokenizer in models.values():
        seq_len = model.shape.seq_len
        rows = [
            pair_row(tokenizer, seq_len, "the quick brown fox", " jumps", "here"),
            pair_row(tokenizer, seq_len, "", "over a lazy dog", "here"),
            *rolling_rows(tokenizer, seq_len, "many small models learn " * 20),
        ]
        assert len(rows) > 4
        actual = [score_rows(model, rows, batch_size=size) for size in (1, 5)]
        for row, alone, together in zip(rows, *actual, strict=True):
            with torch.no_grad():
                log_probs = model(torch.tensor([row.tokens[:-1]])).log_softmax(-1)[0, -row.num_scored :].double()
            targets = torch.tensor(row.tokens[-row.num_scored :])
            expected = float(log_probs.gather(1, targets[:, None]).sum())
            assert alone.log_likelihood == pytest.approx(expected, rel=1e-6)
            assert together.log_likelihood == pytest.approx(expected, rel=1e-6)
            assert alone.is_greedy == together.is_greedy == bool((log_probs.argmax(1) == targets).all())


def test_tasks_are_put_as_conversations_whose_turns_end_the_text(
    models: dict[str, tuple[GPT, Tokenizer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]'")
    from lm_eval.api.instance import Instance

    folder, (model, tokenizer) = next(iter(models.items()))
    _, template = open_template(tokenizer, None)
    lm = open_lm(Path(folder), model.shape.seq_len, 2, template)
    turns = [{"role": "user", "content": "Hello"}]
    assert lm.apply_chat_template(turns) == "<|user|>\nHello<|end|>\n<|assistant|>\n"
    turns.append({"role": "assistant", "content": "It is"})
    assert lm.apply_chat_template(turns, add_generation_prompt=False).endswith("<|assistant|>\nIt is")
    monkeypatch.setattr(lm, "tok_decode", lambda tokens, **kwargs: "Yes<|end|>No")
    for stops in ({"until": ["\n\n"]}, {"until": "\n\n"}, {}):
        request = Instance("generate_until", {}, ("a", {**stops, "max_gen_toks": 4}), 0)
        assert lm.generate_until([request]) == ["Yes"]
