from __future__ import annotations

from pathlib import Path

import pytest

from llmscale.cluster.hostfile import Host, parse_hostfile
from llmscale.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts"
    path.write_text(text)
    return path


def test_hosts_come_in_the_files_order(tmp_path: Path) -> None:
    text = "# the cluster\nnode-1 slots=8\n\n  10.0.0.2\tslots=4   # the small one\nn_3.example.org slots=1\n"
    assert parse_hostfile(write(tmp_path, text)) == (Host("node-1", 8), Host("10.0.0.2", 4), Host("n_3.example.org", 1))


def test_the_hostfiles_of_this_repository_are_right() -> None:
    folder = Path(__file__).resolve().parents[2] / "hostfiles"
    files = [path for path in folder.iterdir() if path.suffix != ".md"]
    assert len(files) >= 4
    for path in files:
        assert parse_hostfile(path)


def test_a_file_that_names_no_host_is_an_error_and_no_local_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no host"):
        parse_hostfile(write(tmp_path, "\n# nothing\n"))
    with pytest.raises(ConfigError, match="does not exist"):
        parse_hostfile(tmp_path / "hostfiel")
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_hostfile(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        parse_hostfile(tmp_path / "binary")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("node-0 slots=0", "slots=0 runs nothing"),
        ("node-0 slots=4097", "slots=4097 is too many"),
        ("node-0:2222 slots=8", "a port .* for it in ~/.ssh/config"),
        ("me@node-0 slots=8", "a user"),
        ("node-[0-3] slots=8", "One|one line per host"),
        ("node-0,node-1 slots=8", "one line per host"),
        ("-oProxyCommand=reboot slots=8", "not a plain host name"),
        ("$(reboot) slots=8", "not a plain host name"),
        ("node1", "Write `node1 slots=N`, N being its GPUs."),
        ("node1 slots=eight", "Write `node1 slots=N`, N being its GPUs."),
        ("node1 4", "Write `node1 slots=4`."),
        ("node1:4", "Write `node1 slots=4`."),
        ("node1 slots = 2", "Write `node1 slots=2`."),
        ("node1 gpus=16", "Write `node1 slots=16`."),
        ("node1 slots=8 max_slots=9", "Write `node1 slots=8`."),
        ("4 node1", "Write one line `name slots=N` per host."),
    ],
)
def test_what_cannot_be_used_is_named_with_its_line_and_the_fix(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path, f"good slots=1\n{line}\n")
    with pytest.raises(ConfigError, match=words) as caught:
        parse_hostfile(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_a_host_may_stand_there_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hosts:3: host 'a' is listed twice"):
        parse_hostfile(write(tmp_path, "a slots=1\nb slots=1\na slots=2\n"))
