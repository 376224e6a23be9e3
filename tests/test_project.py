"""The project as a whole: who imports whom, what starts without torch, and whether the README tells the truth."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml

import llmscale
from llmscale.config.run_config import build_run_config
from tests.conftest import words

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "llmscale"

#: From the bottom to the top: each may import those before it. The tour in docs/development.md has the same order.
LAYERS = words(
    "__init__ keys limits suggestions errors untrusted files terminal error_handling architecture config memory "
    "planning model engine dry_run data checkpoint evaluate numerics training report cluster cli api train "
    "__main__"
)
#: Answer without torch: modules, or packages as a whole.
TORCH_FREE = words(
    "keys limits suggestions errors files untrusted error_handling architecture config memory planning report "
    "cluster cli api train data.shards.manifest data.order.sample_order data.shards.cache checkpoint.manifest "
    "checkpoint.inventory checkpoint.run_state checkpoint.hf_write training.inputs "
    "training.start training.stop_request training.sample_stream training.run_folder training.step_metrics"
)
FLAG = re.compile(r"--[a-z][\w-]*")
SUBCOMMANDS = (
    *words(
        "plan estimate data doctor train launch eval sample "
        "export prune report runs replay completion checkpoint schema"
    ),
    *(f"checkpoint {name}" for name in words("list show verify prune diff import export reshard")),
    *(f"data {name}" for name in words("clean prepare verify train-tokenizer inspect which")),
    *(f"ladder {name}" for name in words("plan run fit sweep")),
)


def modules() -> dict[str, Path]:
    """Every module by its name within the package, packages by their own name."""
    names = {
        path: path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".") for path in PACKAGE.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): path for path, name in sorted(names.items())}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports anywhere, within functions and for type checking too."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write `from llmscale...`"
            full = node.module or ""
            yield from ([f"{full}.{alias.name}" for alias in node.names] if full == "llmscale" else [full])
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def layer_of(module: str) -> int:
    return LAYERS.index(module.split(".")[0])


def test_imports_run_downwards() -> None:
    offences = []
    for name, path in modules().items():
        for imported in imports_of(path):
            inner = imported.removeprefix("llmscale.")
            if inner != imported and inner.split(".")[0] in LAYERS and layer_of(inner) > layer_of(name):
                offences.append(f"llmscale.{name} imports {imported}")
    assert not offences, "each of these imports a module above itself"


def test_no_module_imports_one_that_imports_it() -> None:
    """However far around, and within functions and for type checking too."""
    names = set(modules())
    imports = {
        name: {imported.removeprefix("llmscale.") for imported in imports_of(path)} & names - {name}
        for name, path in modules().items()
    }
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_every_package_has_a_layer() -> None:
    assert {name.split(".")[0] for name in modules()} <= set(LAYERS)


#: Packages whose page names every module in the order in which it is met.
PAGED = ("training", "config")


@pytest.mark.parametrize("package", PAGED)
def test_a_package_has_few_modules_and_its_page_names_them_all(package: str) -> None:
    page = ast.get_docstring(parsed(PACKAGE / package / "__init__.py")) or ""
    listed = [
        name for names in re.findall(r"^ *([a-z_]+(?:, [a-z_]+)*) {2,}\S", page, re.M) for name in names.split(", ")
    ]
    present = [path.stem for path in (PACKAGE / package).iterdir() if path.stem[0] != "_"]
    assert sorted(listed) == sorted(present)
    assert len(present) <= 20


#: The library: any module in any loop. Of config it knows paths and plans that no GPT is part of.
LIBRARY = words(
    "checkpoint.checkpoints checkpoint.store checkpoint.disks checkpoint.module_weights checkpoint.save "
    "checkpoint.load checkpoint.tensor_files "
    "checkpoint.convert checkpoint.deepspeed_write checkpoint.load_deepspeed checkpoint.elastic "
    "data.stream data.batch_sampler data.loader data.order engine.initialize engine.zero_layout engine.zero_shards "
    "engine.process_group engine.loss_scale engine.random_numbers engine.engine_values "
    "numerics.own_engine numerics.own_update"
)
APPLICATION = words("architecture model memory planning training evaluate report cluster cli config")
KNOWN_TO_THE_LIBRARY = words(
    "config.user_paths config.bundled_files config.batch_plan config.muon_plan config.deepspeed"
)


def runtime_imports(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Modules of this package that are imported when code runs, within functions too."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmscale."):
            yield (node.module or "").removeprefix("llmscale.")
        yield from runtime_imports([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])


def test_the_library_knows_no_gpt_no_run_and_no_command() -> None:
    known = modules()
    waiting = [name for name in known if any(name == part or name.startswith(f"{part}.") for part in LIBRARY)]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in known:
            continue
        seen.add(name)
        waiting += runtime_imports(parsed(known[name]).body)
    of_application = {name for name in seen if name.split(".")[0] in APPLICATION}
    assert {name for name in of_application if not name.startswith(tuple(KNOWN_TO_THE_LIBRARY))} == set()
    assert len(seen) < 75


def test_opening_a_session_needs_few_modules() -> None:
    imported = {name for name in imports_of(PACKAGE / "training" / "open_session.py") if name.startswith("llmscale.")}
    assert len(imported) <= 32


@pytest.fixture(scope="module")
def bare_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def run_python(code: str, environment: dict[str, str]) -> str:
    """What a fresh interpreter prints; fails with its traceback."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_lower_half_does_not_import_torch(bare_environment: dict[str, str]) -> None:
    names = [f"llmscale.{m}" for m in modules() if any(m == free or m.startswith(f"{free}.") for free in TORCH_FREE)]
    assert len(names) > 30
    code = f"""
import importlib, sys
heavy = ("torch", "deepspeed", "streaming", "transformers")
for name in {names!r}:
    importlib.import_module(name)
    found = [h for h in heavy if h in sys.modules]
    assert not found, f"{{name}} imports {{found[0]}}"
"""
    run_python(code, bare_environment)


#: Packages that the extra `train` does not bring.
OTHER_EXTRAS = words(
    "boto3 datasets fsspec gigatoken lm_eval matplotlib orjson py3langid pyarrow ray rensa scipy streaming transformers"
)


def needed_imports(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Packages without which a module cannot be imported: not those of functions, type checking and ImportError."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield from needed_imports([*node.body, *node.orelse])
        elif isinstance(node, (ast.ClassDef, ast.With)) or (
            isinstance(node, ast.Try) and "ImportError" not in "".join(map(ast.unparse, node.handlers))
        ):
            yield from needed_imports(node.body)


def test_no_module_of_a_training_run_needs_another_extra() -> None:
    """`llmscale train --text` and the demo prepare a dataset with the packages of `train`, or of `engine`, alone."""
    needs = {
        name: set(needed_imports(parsed(path).body)) & {*OTHER_EXTRAS}
        for name, path in modules().items()
        if not name.startswith(("evaluate.lm_eval", "dry_run.hf_module", "__main__"))
    }
    assert {name: packages for name, packages in needs.items() if packages} == {}


@pytest.fixture(scope="module")
def help_texts(bare_environment: dict[str, str]) -> dict[str, str]:
    """The help of every command, "" for `llmscale` and "train.py", from one process that may not import torch."""
    code = f"""
import sys
from llmscale import train
from llmscale.cli.main import main
for command in {["", *SUBCOMMANDS, "train.py"]!r}:
    try:
        words = ["--help", "all"] if command.startswith("train") else ["--help"]
        train.main(words) if command == "train.py" else main([*command.split(), *words])
        raise AssertionError(command)
    except SystemExit as end:
        assert end.code == 0, command
    assert "torch" not in sys.modules, command
    print("-- end --")
"""
    texts = run_python(code, bare_environment).split("-- end --\n")[:-1]
    return dict(zip(["", *SUBCOMMANDS, "train.py"], texts, strict=True))


def test_help_answers_without_torch(help_texts: dict[str, str]) -> None:
    assert "--global-batch-size" in help_texts["train.py"]
    for name in ("", *SUBCOMMANDS):
        usage = help_texts[name].partition("usage: ")[2]
        assert usage.split(" [")[0] == f"llmscale {name}".rstrip()


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_home_folders_are_found_in_one_place() -> None:
    """Path.expanduser and Path.home raise RuntimeError for a user without one."""
    calls = {
        path.name
        for path in (ROOT / "llmscale").rglob("*.py")
        if re.search(r"\)\.expanduser\(|\w\.expanduser\(\)|Path\.home\(", path.read_text(encoding="utf-8"))
    }
    assert calls == {"paths.py"}


def code_blocks(text: str) -> Iterator[str]:
    yield from re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_the_readme_begins_with_clone_outcome_two_commands_a_picture_and_three_numbers() -> None:
    text = readme()
    clone, begin, *_ = code_blocks(text)
    assert clone.startswith("git clone ")
    assert begin.split("\n")[:2] == ["./scripts/quickstart.sh", "./scripts/test.sh"]
    assert "\nllmscale train --ds ds_configs/zero2.json --model tiny-muon-1m\n" in text
    assert "![" not in text.partition(begin)[0], "no badges before the first command"
    assert "predicts this" in text.partition(begin)[0], "a named model, with its cost"
    first_screen = "\n".join(text.splitlines()[:40])
    assert "](docs/images/resumed.png)" in first_screen
    assert len(re.findall(r"^\| .* \| \[.*\]\((?:scripts|docs)/.*\) \|$", first_screen, flags=re.MULTILINE)) >= 3
    assert len(text.split()) <= 900


#: Pages that people read, and links within and between them.
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "ds_configs/README.md", "hostfiles/README.md")),
    *(ROOT / "scripts").rglob("README.md"),
    *(ROOT / "docs").glob("*.md"),
]
LINK = re.compile(r"\]\(((?!https?:)[^)#\s]*)(?:#([^)\s]*))?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_no_output_is_committed() -> None:
    """A run in the repository left the CSV of DeepSpeed's monitor (`output_path: out`) in a commit."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git here")
    words = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "/out/" in (ROOT / ".gitignore").read_text().split()


def test_every_machine_whose_speed_is_said_has_a_result() -> None:
    text = (ROOT / "docs" / "measurements.md").read_text()
    (head,) = re.findall(r"^\| of the plain loop \|(.*)\|$", text, flags=re.MULTILINE)
    machines = head.split("|")
    assert len(machines) == 3 and all("](../scripts/bench/speed/" in machine for machine in machines)
    for page in ("README.md", "docs/speed.md"):
        assert "three\n  machines" in (ROOT / page).read_text() or "three machines" in (ROOT / page).read_text(), page


def test_every_link_between_pages_leads_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for path, anchor in LINK.findall(without_code(page.read_text())):
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    assert not wrong


def test_every_page_opens_with_its_purpose_and_an_example_and_has_no_long_item() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        text = re.sub(r"<!--.*?-->\n+", "", page.read_text())
        opening = text.partition("\n```")[0].splitlines()
        assert opening[0].startswith("# ") and re.match(r"[\w`]", opening[2]), f"{page.name} opens with what it is for"
        assert len(opening) <= 14 and "\n```" in text, f"{page.name}: the shortest example comes first"
    for page in PAGES[2:]:
        items = re.findall(
            r"^ *(?:[-*]|\d+\.) .*(?:\n(?! *(?:[-*]|\d+\.) |\n|\||#).+)*", without_code(page.read_text()), re.M
        )
        assert [item for item in items if len(item.split()) > 80] == [], page.name


def test_every_page_has_one_title_and_summaries_are_short() -> None:
    for page in PAGES:
        assert len(re.findall(r"^# ", without_code(page.read_text()), re.M)) == 1, page.name
    assert len((ROOT / "docs" / "data.md").read_text().split()) <= 1200
    listed = (ROOT / "CHANGELOG.md").read_text().partition("### What is in it\n\n")[2].partition("\n\n")[0]
    assert 0 < len(listed.splitlines()) <= 25


def test_every_path_in_the_readme_exists() -> None:
    text = readme()
    linked = re.findall(r"\]\(((?!https?:)[^)#]+)\)", text)
    written = re.findall(r"(?<![\w./-])((?:\./)?(?:scripts|ds_configs|hostfiles|docs|llmscale|tests)/[\w./-]*)", text)
    paths = {path.rstrip(".") for path in linked + written}
    assert len(paths) > 15
    missing = sorted(path for path in paths if not (ROOT / path).exists())
    assert not missing


def names_a_module(dotted: str) -> bool:
    """Whether it is one of llmscale's, or a name within one."""
    parts = dotted.split(".")
    files = (ROOT.joinpath(*parts[:length]).with_suffix(".py") for length in range(2, len(parts) + 1))
    return ROOT.joinpath(*parts).is_dir() or any(file.exists() for file in files)


@pytest.mark.parametrize("folder", ["README.md", "docs", "scripts", "ds_configs", "llmscale", "tests"])
def test_every_module_and_test_that_is_named_exists(folder: str) -> None:
    """In documents, docstrings and code alike: llmscale/data/loader.py, llmscale.data.loader, `data/loader.py`."""
    packages = "|".join(path.name for path in PACKAGE.iterdir() if path.is_dir())
    paths = [ROOT / folder] if (ROOT / folder).is_file() else list((ROOT / folder).rglob("*"))
    missing = []
    for path in (path for path in paths if path.suffix in (".py", ".md", ".sh", ".sbatch") and path != Path(__file__)):
        text = path.read_text()
        named = re.findall(r"(?<![\w/.-])((?:llmscale|tests|scripts)/[\w/]+\.(?:py|sh|md))\b", text)
        named += [f"llmscale/{name}" for name in re.findall(rf"`((?:{packages})/[\w/]+\.py)`", text)]
        missing += [f"{path}: {name}" for name in named if not (ROOT / name).exists()]
        dotted = re.findall(r"(?<![\w/.-])llmscale(?:\.[a-z]\w*)+", text)
        missing += [f"{path}: {name}" for name in dotted if not names_a_module(name)]
        tests = re.findall(r"(?<![\w/])test_\w+\.py\b", text)
        missing += [f"{path}: {name}" for name in tests if not list((ROOT / "tests").rglob(name))]
    assert not missing


def test_the_tour_names_every_package_in_import_order() -> None:
    tour = (ROOT / "docs" / "development.md").read_text().partition("## Tour")[2].partition("\n## ")[0]
    named = [name for name in re.findall(r"^  (\w+)(?:/|\.py) ", tour, flags=re.MULTILINE)]
    packages = [path.name for path in PACKAGE.iterdir() if path.is_dir() and list(path.glob("*.py"))]
    assert set(packages) <= set(named)
    places = [LAYERS.index(name) for name in named]
    assert places == sorted(places, reverse=True), "the tour goes from the top layer to the bottom"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_flags_on_every_page_exist(page: Path, help_texts: dict[str, str]) -> None:
    """Flags of train.py and of the subcommands, as written in commands over one or more lines and in sentences."""
    text = page.read_text()
    for command in (*_commands(text), *re.findall(r"`(llmscale [^`\n]+)`", text)):
        if "llmscale/train.py" in command:
            name, rest = "train.py", command.partition("llmscale/train.py")[2]
        elif command.startswith("llmscale "):
            words = command.split()[1:3]
            name = " ".join(words) if " ".join(words) in SUBCOMMANDS else words[0]
            # What follows is train.py's.
            rest, _, train_flags = command.partition(" #")[0].partition(" -- ")
            of_train = help_texts["train" if name in ("ladder run", "ladder sweep") else "train.py"]
            assert set(FLAG.findall(train_flags)) <= set(FLAG.findall(of_train)), command
        else:
            continue
        for flag in FLAG.findall(rest):
            assert flag in help_texts[name], f"{command!r}: {flag} is not a flag of {name}"


def _commands(text: str) -> Iterator[str]:
    for block in code_blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.strip().removeprefix("$ ")


def test_the_run_file_in_the_tutorial_is_legal() -> None:
    """Every key is known and every value of the right type."""
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    values = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```", tutorial, flags=re.MULTILINE | re.DOTALL)[0])
    config = build_run_config(values)
    assert config.tokens == 10_000_000_000
    assert config.lr == 6e-4


def test_the_version_has_a_changelog() -> None:
    assert f"\n## [{llmscale.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_pin_everything_and_no_local_version() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    for line in lines:
        assert re.fullmatch(r'[\w.-]+==[\w.]+(; python_version (<|>=) "3\.11")?', line), line
    assert "torch==2.13.0" in lines


#: May import multiprocessing, whose children llmscale.untrusted.interpreter protects.
STARTS_PROCESSES = ("data.loader", "data.clean.annotate", "untrusted.interpreter")


def test_python_is_started_in_one_place() -> None:
    """The ranks of a machine run a script, whose own folder is first on the search path."""
    offences = []
    for name, path in modules().items():
        commands = [] if name in ("untrusted.interpreter", "cluster.launch.ranks") else list(ast.walk(parsed(path)))
        for command in commands:
            for word in command.elts if isinstance(command, (ast.List, ast.Tuple)) else ():
                is_named = isinstance(word, ast.Constant) and word.value in ("python", "python3")
                if is_named or (isinstance(word, ast.Attribute) and word.attr == "executable"):
                    offences.append(f"{name}:{command.lineno}")
        imported = {full.split(".")[0] for full in imports_of(path)}
        if name not in STARTS_PROCESSES and imported & {"multiprocessing", "multiprocess", "runpy"}:
            offences.append(name)
    assert not offences, "each of these starts Python; use llmscale.untrusted.interpreter"


#: Modules that write into run folders, and calls in them that write elsewhere: to a private folder, or a new one.
WRITES_RUN_FOLDERS = ("training", "cluster.launch", "checkpoint")
WRITES_ELSEWHERE = {
    "cluster.launch.host": 1,  # /dev/null
    "checkpoint.tensor_files": 1,  # the folder of a checkpoint that is being made
    "checkpoint.hf_write": 2,  # the folder of an export that is being made
    "checkpoint.initial_weights": 1,  # the Hub's cache
}


def _writes(tree: ast.AST) -> Iterator[ast.Call]:
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        if called in ("write_text", "write_bytes", "touch", "NamedTemporaryFile", "mkstemp"):
            yield call
        elif called in ("open", "fdopen"):
            modes = [word.value for word in call.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            flags = " ".join(ast.unparse(word) for word in call.args[1:])
            is_safe = any(isinstance(word, ast.Call) and ast.unparse(word.func) == "open_own" for word in call.args)
            for_writing = any(re.fullmatch("[rwaxbt+]*[wax+][rwaxbt+]*", mode) for mode in modes)
            if not is_safe and (for_writing or re.search("O_(WRONLY|RDWR|CREAT|APPEND)", flags)):
                yield call


def test_what_a_run_folder_holds_is_written_in_one_way() -> None:
    for name, path in modules().items():
        if name.startswith(WRITES_RUN_FOLDERS):
            actual = list(_writes(parsed(path)))
            assert len(actual) == WRITES_ELSEWHERE.get(name, 0), (
                f"{name} writes at lines {[call.lineno for call in actual]}; use open_own, RecordLog or write_durably"
            )


def test_engine_is_train_without_streaming() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    train, engine = (
        set(re.findall(r'^ +"([^"]+)"', re.search(rf"^{extra} = \[$(.*?)^\]", text, re.DOTALL | re.MULTILINE)[1], re.M))  # type: ignore[index]
        for extra in ("train", "engine")
    )
    assert train - engine == {"mosaicml-streaming>=0.13,<0.14"} and engine < train
