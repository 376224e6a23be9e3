from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

SPECIAL = ("<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<tool_call>"
#: What people write and what attackers do.
AWKWARD = (
    "",
    "a",
    "🙂 👩‍👩‍👧 naïve 你好 é e\u0301",
    "a\r\n\r\n\tb",
    "\0\x01\x7f\ufeff",
    " " * 100 + "x" + "\n" * 50,
    "1234567 isn't it I'LL",
    "x" * 2000,
    "a<|endoftext|>b",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<s>[INST] hi [/INST]</s>",
    "<|endoftext|><|endoftext|>",
)
MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def trained_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer.json of Llama's kind, trained on our documentation."""
    docs = Path(__file__).parents[3] / "docs"
    fast = Tokenizer(models.BPE(ignore_merges=True))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    fast.train([str(docs / "data_reference.md")], trainer)
    fast.add_special_tokens(list(SPECIAL))
    fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<tool_call>", "<b>", "<|fim|>")])
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    fast.save(str(path))
    return path


@pytest.fixture
def make_model(trained_json: Path, tmp_path: Path) -> MakeModel:
    """Writes a model's folder; `template`: what tokenizer.json puts around a text; `config`: tokenizer_config.json."""

    def make(
        *, template: str = "", config: dict[str, object] | None = None, name: str = "model", **others: object
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        fast = Tokenizer.from_file(str(trained_json))
        if template:
            ids = [(text, fast.token_to_id(text)) for text in SPECIAL]
            fast.post_processor = TemplateProcessing(single=template, special_tokens=ids)
        fast.save(str(folder / "tokenizer.json"))
        if config is not None:
            # What transformers writes for no limit.
            record = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": int(1e30), **config}
            (folder / "tokenizer_config.json").write_text(json.dumps(record))
        for file, record in others.items():
            (folder / f"{file}.json").write_text(json.dumps(record))
        return folder

    return make
