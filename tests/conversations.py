"""Conversations of very different lengths, and what of their text are targets, found without llmscale."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests import warm_start
from tests.conftest import REPOSITORY

#: Context of the sets.
T = 96
#: An assistant's turn with its end in the text of the default template.
TURN = re.compile(r"(?<=<\|assistant\|>\n).*?<\|end\|>", re.DOTALL)


def write_conversations(path: Path, number: int = 160) -> None:
    """Write JSON lines of one or two questions with answers of 1 to 40 letters."""
    draw = random.Random(0)
    lines = []
    for _ in range(number):
        turns = []
        for _ in range(draw.choice((1, 1, 2))):
            question = "".join(draw.choices("abcd ", k=draw.randint(1, 8))).strip() or "a"
            answer = (question[0] * 40)[: draw.choice((1, 2, 3, 30, 40)) if not turns else 1]
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines))


def write_words(path: Path) -> None:
    """Write JSON lines of numbers."""
    path.write_text("\n".join(json.dumps({"text": f"{number} " * 60}) for number in range(80)))


def prepare_conversations(text: Path, out: Path, *flags: str) -> None:
    """Prepare conversations as bytes."""
    prepare(text, out, "--chat", *flags)


def prepare(text: Path, out: Path, *flags: str) -> None:
    """Prepare text as bytes."""
    command = ["-m", "llmscale", "data", "prepare", "--input", str(text), "--out", str(out), *flags]
    command += ["--tokenizer", "bytes", "--seq-len", str(T), "--val-fraction", "0.1", "--workers", "1"]
    warm_start.run([sys.executable, *command], check=True, cwd=REPOSITORY, capture_output=True)


def conversations_in(row: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the bytes and targets of each conversation in a row of the default template, told by its text."""
    conversations = []
    for text in bytes(255 if token == 256 else token for token in row).split(b"\xff"):
        is_target = torch.zeros(len(text), dtype=torch.bool)
        for turn in TURN.finditer(text.decode()):
            is_target[turn.start() : turn.end()] = True
        if len(text):
            conversations.append((torch.tensor(list(text)), is_target))
    return conversations


#: Special tokens of `write_tokenizer`, from 0 on.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")


def write_tokenizer(folder: Path, template: str | None, eos: str = "<|endoftext|>") -> None:
    """Write a byte-level tokenizer with a chat template."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator(["\n\nIt is four is it  <|im_start|>user\nWhat is it\n\n"], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos}
    named = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | named))
