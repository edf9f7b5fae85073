"""README, CONTRIBUTING and docs/: links, commands, keys, files and tests that they name exist."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection

import pytest

import evaluate
import pages
import plan
import sample
from cloud import attempts
from config.compose import load_config
from config.help import markdown
from config.schema import KEYS
from pages import CONTRIBUTING, DOCS, PAGES, README, Command, inline_code, text_of
from runs import ROOT
from snapshot import __main__ as snapshot_command
from tracked import name_of, tracked

MISSPELLED = "train.max_stepz"
"""The mistake of a fault that is told of."""
SECTIONS = "|".join(sorted({key.split(".")[0] for key in KEYS}))
TESTS = ROOT / "tests"
FAULTS = DOCS / "resume-and-faults.md"
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))  # last: its data.py is not the room of that name
each_page = pytest.mark.parametrize("page", PAGES, ids=pages.name_of)


@each_page
def test_every_link_leads_somewhere(page):
    prose, _ = pages.split(text_of(page))
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in pages.headings_of(target), link


def test_every_page_is_linked_in_the_readme():
    readme = text_of(README)
    for page in PAGES[1:]:
        assert f"]({pages.name_of(page)})" in readme
    assert len(readme.splitlines()) <= 140


def test_every_room_is_on_its_page():
    rooms = {path.parent for path in tracked(suffix=".py") if path.name == "__init__.py"}
    assert len(rooms) >= 10
    for room in rooms:
        name = room.relative_to(ROOT)
        assert f"](../{name})" in text_of(DOCS / "how-the-code-is-organised.md")


# Commands: what runs is run by test_readme.py; here every one is read as its program reads it.

PROGRAMS = "accelerate docker git hf kubectl lm_eval mypy pip pytest python ruff sbatch sky uv"
FILES = (".py", ".yaml", ".sbatch", "requirements.txt", "requirements-dev.txt")


def read_overrides(words: list[str]) -> None:
    given = [word for word in words if word not in ("--show", "--help")]
    load_config([word.replace("${oc.env:SLURM_ARRAY_TASK_ID}", "1") for word in given])


def read_module(parse: Callable, commands: Collection[str]) -> Callable[[list[str]], None]:
    """What reads `<command> ...`; a command alone is only named."""
    return lambda words: parse(words) if words[1:] else set(words) <= set(commands)


def read_attempts(words: list[str]) -> None:
    if "train.py" in words:
        attempts.parse(words)


READERS: dict[str, Callable[[list[str]], object]] = {
    "train.py": read_overrides,
    "plan.py": lambda words: read_overrides(plan.parse(words).overrides),
    "sample.py": sample.parse,
    "evaluate.py": evaluate.parse,
    "-m snapshot": read_module(snapshot_command.parse, snapshot_command.COMMANDS),
    "-m cloud.attempts": read_attempts,
    "accelerate-gpt": read_attempts,
    "code.tar.gz": read_attempts,
}
"""By a program of this project, what reads the words after it. The image starts the attempts."""


def read(command: Command) -> None:
    """Each file of a command exists, and its program takes the words."""
    words = [word for word in command.words if word != "..."]
    assert words[0] in PROGRAMS.split()
    for at, word in enumerate(words):
        rest = words[at + 1 :]
        if word.endswith(FILES) and "=" not in word and not word.startswith("page/"):
            assert (ROOT / word).is_file(), word
        if word.startswith("WORDS="):  # of SkyPilot's task
            read_overrides(word.removeprefix("WORDS=").split())
        if word.endswith(".sbatch"):
            read_overrides(rest)
        if word.startswith("benchmarks/"):
            sources = [(ROOT / word).read_text(), (ROOT / "benchmarks" / "harness.py").read_text()]
            for option in (one for one in rest if one.startswith("--")):
                assert any(f'"{option}"' in source for source in sources), option
        name = word if words[at - 1] != "-m" else f"-m {word}"
        if name in READERS:
            READERS[name](rest)
    if words[0] == "pytest" and "-m" in words:
        known = re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        assert {*words[words.index("-m") + 1].split()} <= {*known, "not", "and", "or"}


COMMANDS = [
    Command(command.page, part.strip())
    for page in PAGES
    for command in (*pages.shown_in(page), *pages.mentioned_in(page))
    for part in command.line.split("&&")
]


@pytest.mark.parametrize("command", list(dict.fromkeys(COMMANDS)), ids=str)
def test_every_command_is_one_that_its_program_takes(command):
    read(command)


@each_page
def test_every_key_and_preset_exists(page):
    prose, blocks = pages.split(text_of(page))
    for code in (*inline_code(prose), *blocks):
        for key in re.findall(rf"(?<![\w./-])(?:{SECTIONS})\.[a-z_]+\b(?![(/])", code):
            assert key in (*KEYS, MISSPELLED) or key.endswith((".py", ".md", ".safetensors")), key
        for group, preset in re.findall(r"(?<![\w.])(model|experiment)=(\w+)", code):
            assert (ROOT / "config" / group / f"{preset}.yaml").is_file(), preset


@each_page
def test_every_file_that_is_named_exists(page):
    prose, _ = pages.split(text_of(page))
    tops = "|".join({path.relative_to(ROOT).parts[0] for path in tracked()})
    for code in inline_code(prose):
        for path in re.findall(rf"(?<![\w./-])(?:{tops})/[\w./*-]+\.(?:py|md|yaml|sbatch)", code):
            assert list(ROOT.glob(path)), path


def test_the_tables_of_keys_are_the_schema_s():
    page = text_of(DOCS / "configuration.md")
    between = re.search(r"<!-- begin of (.*) -->\n(.*)\n<!-- end of \1 -->", page, flags=re.DOTALL)
    assert between is not None
    assert between[1] == "python -m config.help --markdown"
    assert between[2] == markdown()


def assert_tests_exist(rows: list[tuple[str, str]]) -> None:
    """Each file has the tests that stand beside it, its own or taken from another."""
    for file, what in rows:
        text = (TESTS / file).read_text()
        for name in re.findall(r"`(test_\w+)`", what):
            assert re.search(rf"^(def {name}\(|    {name},$)", text, re.MULTILINE), (file, name)


def test_every_fault_and_every_exit_code_has_its_test():
    rows = re.findall(r"^\|.*\| ([\w/]+): (`test_\w+`) \|$", text_of(FAULTS), re.MULTILINE)
    assert len(rows) >= 55
    assert_tests_exist([(f"{file}.py", name) for file, name in rows])


def test_every_promise_has_its_tests_and_every_file_of_them_is_named():
    listed = text_of(CONTRIBUTING).split("## The promises and their tests")[1]
    titles = re.findall(r"^### (\d\. .*)$", listed, re.MULTILINE)
    told = re.findall(r"^(\d\. )\*\*(.*?)\.?\*\*", text_of(README), re.MULTILINE)
    assert len(told) == 7
    assert ["".join(one) for one in told] == titles
    rows = re.findall(r"^\| `tests/([\w/]+\.py)` \| (.*) \|$", listed, re.MULTILINE)
    assert_tests_exist(rows)
    promised = {name_of(path).removeprefix("tests/") for path in tracked("tests/promises", ".py")}
    assert promised <= {file for file, _ in rows}


def test_the_figures_of_the_performance_page_are_those_of_the_json_files():
    page = importlib.import_module("page")
    text = page.PAGE.read_text()
    assert page.with_table(text) == text, "run python benchmarks/page.py"


def test_every_benchmark_can_still_be_imported():
    """They are run seldom: a name that they take from the project must not be gone by then."""
    names = [path.stem for path in tracked("benchmarks", ".py")]
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    paths = os.pathsep.join(map(str, (ROOT, BENCHMARKS, TESTS / "support")))
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-P", "-c", code], env=environment, check=True)
