"""Conversations of every form that people have become the same turns, and nothing of a record vanishes."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest

from llmscale.cli.main import main
from llmscale.data.prepare.conversations import conversation_text
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.errors import DataError

DIALOGUE = [{"role": "user", "content": "Thanks"}, {"role": "assistant", "content": "Welcome"}]
SHAREGPT = [{"from": "human", "value": "Thanks"}, {"from": "gpt", "value": "Welcome"}]
SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"messages": DIALOGUE}, DIALOGUE),
        ({"messages": json.dumps(DIALOGUE)}, DIALOGUE),
        ({"prompt": "Thanks", "completion": "Welcome"}, DIALOGUE),
        ({"prompt": DIALOGUE[:1], "completion": DIALOGUE[1:]}, DIALOGUE),
        ({"conversations": SHAREGPT}, DIALOGUE),
        ({"conversations": json.dumps(SHAREGPT)}, DIALOGUE),
        ({"conversations": SHAREGPT, "system": "Be kind."}, [SYSTEM, *DIALOGUE]),
        ({"messages": [SYSTEM, *DIALOGUE], "system": "Be kind."}, [SYSTEM, *DIALOGUE]),
        ({"instruction": "Thanks", "input": "", "output": "Welcome"}, DIALOGUE),
        (
            {"instruction": "Add.", "input": "2 and 2", "output": "4", "history": [["Thanks", "Welcome"]]},
            [*DIALOGUE, {"role": "user", "content": "Add.\n2 and 2"}, {"role": "assistant", "content": "4"}],
        ),
    ],
)
def test_records_of_every_form(record: dict[str, object], turns: object) -> None:
    assert json.loads(conversation_text(record, "messages").partition("\n")[0]) == {"messages": turns}


def test_every_key_stays() -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "weight": 0}
    record = {
        "messages": [DIALOGUE[0], turn],
        "tools": json.dumps([{"name": "f"}]),
        "documents": [{"title": "t", "text": "x"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "id": 7,
    }
    conversation, rest = map(json.loads, conversation_text(record, "messages").split("\n"))
    assert conversation == {"messages": [DIALOGUE[0], turn], "tools": [{"name": "f"}]}
    assert rest == {"documents": record["documents"], "enable_thinking": False, "id": 7}


def test_what_no_text_has_is_removed() -> None:
    record = {"messages": [{"role": "user", "content": "\ufdd0a\ud800"}], "tools": ["\ufdd2", {"a": "\ufdef"}]}
    text = conversation_text(record, "messages")
    assert json.loads(text) == {"messages": [{"role": "user", "content": "a\ufffd"}], "tools": ["", {"a": ""}]}


def test_conversations_of_a_parquet_file(tmp_path: Path) -> None:
    from pyarrow import parquet

    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    rows = [
        {"messages": [*DIALOGUE], "source": "a"},
        {"messages": [DIALOGUE[0], {"role": "assistant", "tool_calls": calls}], "source": None},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    texts = [*open_source(str(tmp_path / "chats.parquet"), is_chat=True).documents()]
    assert [json.loads(text.partition("\n")[0])["messages"] for text in texts] == [row["messages"] for row in rows]
    assert json.loads(texts[0].partition("\n")[2]) == {"source": "a"}


def test_an_unknown_form_names_those_that_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    with pytest.raises(DataError, match=r"answer, question.*--chat reads messages of role .* Alpaca's instruction"):
        list(open_source(str(tmp_path / "x.jsonl"), is_chat=True).documents())
    (tmp_path / "x.csv").write_text("messages,b\nx,y\n")
    command = ["data", "prepare", "--chat", "--input", str(tmp_path / "x.csv"), "--out", str(tmp_path / "set")]
    assert main([*command, "--tokenizer", "bytes"]) == 2
    assert "not from CSV" in capsys.readouterr().err
