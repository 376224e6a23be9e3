from __future__ import annotations

from pathlib import Path

import pytest

from llmscale.data.tokenizers.hugging_face import load_huggingface
from llmscale.errors import DataError
from tests.data.tokenizers.conftest import TEMPLATE, MakeModel

Files = dict[str, dict[str, object]]
S, EOT, IM_START, IM_END = range(600, 604)


@pytest.mark.parametrize(
    ("files", "token", "message"),
    [
        ({"config": {"eos_token": "<s>"}}, S, "eos_token of tokenizer_config.json"),
        ({"config": {"eos_token": {"content": "<s>"}}}, S, "eos_token of tokenizer_config.json"),
        ({"special_tokens_map": {"eos_token": "<s>"}}, S, "eos_token of special_tokens_map.json"),
        ({"config": {"eos_token": None}}, EOT, "no file names one, and tokenizer.json has it"),
        ({"hf_config": {"eos_token_id": S}}, S, "eos_token_id of config.json"),
        ({"generation_config": {"eos_token_id": [S]}}, S, "eos_token_id of generation_config.json"),
        (
            {"config": {"eos_token": "<s>"}, "hf_config": {"eos_token_id": S}},
            S,
            "eos_token of tokenizer_config.json and eos_token_id of config.json",
        ),
        (
            {
                "config": {"eos_token": "<|im_end|>", "chat_template": TEMPLATE},
                "generation_config": {"eos_token_id": [IM_END, EOT]},
            },
            EOT,
            "eos_token_id of generation_config.json; '<|im_end|>' ends a turn of its chats",
        ),
    ],
)
def test_what_the_files_agree_on(files: Files, token: int, message: str, make_model: MakeModel) -> None:
    tokenizer = load_huggingface(_make(make_model, files))
    assert tokenizer.eot_token == token
    text = tokenizer.tokens()[token]
    assert tokenizer.describe_ends() == f"Documents end with {text!r} ({token}, {message})."


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (
            {"config": {"eos_token": "<|im_end|>"}, "generation_config": {"eos_token_id": [IM_END, EOT]}},
            r"names several end-of-text tokens: '<\|im_end\|>' \(eos_token of tokenizer_config\.json and "
            r"eos_token_id of generation_config\.json\); '<\|endoftext\|>' \(.*\)\. Choose one with --eot-token\.",
        ),
        ({"config": {"eos_token": "<eos>"}}, r"names the token '<eos>', which tokenizer\.json lacks\..*--eot-token"),
        ({"hf_config": {"eos_token_id": 99_999}}, r"config\.json names the token 99999, which .* lacks"),
        ({"hf_config": {"eos_token_id": "2"}}, r"eos_token_id of config\.json names the token '2', which"),
        (
            {"config": {"eos_token": "<s>", "add_bos_token": "yes"}},
            r"add_bos_token is 'yes', and must be true or false",
        ),
    ],
)
def test_what_is_not_decidable_is_asked_for(files: Files, text: str, make_model: MakeModel) -> None:
    folder = _make(make_model, files)
    with pytest.raises(DataError, match=text):
        load_huggingface(folder)
    if "add_bos" not in text:
        chosen = load_huggingface(folder, eot_token="<|im_start|>")
        assert (chosen.eot_token, chosen.ends.origin) == (IM_START, "--eot-token")


def test_an_unknown_choice_names_the_nearest(make_model: MakeModel) -> None:
    with pytest.raises(DataError, match=r"--eot-token '<\|im_ends\|>' is not a token.*Did you mean '<\|im_end\|>'\?"):
        load_huggingface(make_model(), eot_token="<|im_ends|>")


def _make(make_model: MakeModel, files: Files) -> Path:
    folder = make_model(**{name: record for name, record in files.items() if name != "hf_config"})
    if "hf_config" in files:
        make_model(name="other", config=files["hf_config"])
        (folder.parent / "other" / "tokenizer_config.json").rename(folder / "config.json")
    return folder
