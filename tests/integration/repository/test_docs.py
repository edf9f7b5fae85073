"""README, CONTRIBUTING and docs/: links, commands, keys, files and tests that they name exist."""

from __future__ import annotations

import re
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


def test_every_accelerate_config_has_its_row():
    for path in tracked("accelerate_configs"):
        assert f"\n| `{path.name}` |" in text_of(DOCS / "parallelism.md")
        assert f"`{path.name}`" in text_of(README)


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


def defines(source: str, name: str) -> bool:
    """Whether a file defines a function, a class, a constant, or a method `Class.method`."""
    first, _, method = name.partition(".")
    found = re.search(rf"^(?:def|class) {first}\b|^{first}(?:: .*)? = ", source, re.MULTILINE)
    inside = not method or re.search(rf"^    def {method}\(", source, re.MULTILINE)
    return bool(found and inside)


@each_page
def test_what_is_said_to_be_in_a_file_is_defined_there(page):
    names = r"((?:`[\w.]+`(?:, | and )?)+) in \[([\w./]+)\]"
    for listed, file in re.findall(names, text_of(page)):
        for name in inline_code(listed):
            assert defines((ROOT / file).read_text(), name), (name, file)


def test_the_tables_of_keys_are_the_schema_s():
    page = text_of(DOCS / "configuration.md")
    between = re.search(r"<!-- begin of (.*) -->\n(.*)\n<!-- end of \1 -->", page, flags=re.DOTALL)
    assert between is not None
    assert between[1] == "python -m config.help --markdown"
    assert between[2] == markdown()


def has_test(file: str, name: str) -> bool:
    """Whether a test file has a test of this name, its own or one that it takes from another."""
    text = (TESTS / file).read_text()
    return re.search(rf"^(def {name}\(|    {name},$)", text, flags=re.MULTILINE) is not None


def test_every_fault_and_every_exit_code_has_its_test():
    rows = re.findall(r"^\|.*\| ([\w/]+): `(test_\w+)` \|$", text_of(FAULTS), flags=re.MULTILINE)
    assert len(rows) >= 55
    for file, name in rows:
        assert has_test(f"{file}.py", name), (file, name)


def promises() -> dict[str, str]:
    """The part of CONTRIBUTING about each promise, by the promise's title."""
    listed = text_of(CONTRIBUTING).split("## The promises and their tests")[1]
    parts = re.split(r"^### ", listed, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: part for part in parts}


def test_the_promises_are_those_of_the_readme():
    told = re.findall(r"^(\d)\. \*\*(.*?)\.?\*\*", text_of(README), flags=re.MULTILINE)
    assert [f"{number}. {title}" for number, title in told] == list(promises())
    assert len(told) == 7


@pytest.mark.parametrize("promise", promises())
def test_every_test_of_a_promise_exists(promise):
    rows = re.findall(r"^\| `tests/([\w/]+\.py)` \| (.*) \|$", promises()[promise], flags=re.M)
    assert rows
    for file, what in rows:
        assert (TESTS / file).is_file()
        for name in re.findall(r"`(test_\w+)`", what):
            assert has_test(file, name), (file, name)


def test_every_promise_test_file_is_named():
    named = set(re.findall(r"`(tests/promises/[\w/]+\.py)`", "".join(promises().values())))
    assert named == {name_of(path) for path in tracked("tests/promises", ".py")}
