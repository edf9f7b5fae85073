"""README, CONTRIBUTING and docs/: links, commands, keys, files and tests that they name exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from huggingface_hub.cli.jobs import uv_app

import evaluate
import images
import pages
import plan
import sample
from cloud import attempts
from config.compose import load_config
from config.help import PRESETS, markdown
from config.schema import KEYS
from data import __main__ as data_command
from images import CPU_INDEX
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
    assert len(readme.splitlines()) <= 160


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


def read_launch(command: Command) -> None:
    if "-m" in command.words:
        module = command.line[command.line.index("-m ") :]
        read_python(Command(command.page, f"python {module}"))
        return
    config, overrides = pages.launched_by(command)
    assert yaml.safe_load((ROOT / config).read_text())["compute_environment"] == "LOCAL_MACHINE"
    load_config(overrides)


def read_python(command: Command) -> None:
    words = command.words[1:]
    if words[0].startswith("page/"):  # of a Space, which the command before it makes
        assert (ROOT / "browser" / words[0].removeprefix("page/")).is_file()
        return
    if words[0] == "-m":
        module = ROOT / words[1].replace(".", "/")
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        if words[1] == "snapshot" and words[3:]:
            snapshot_command.parse(words[2:])
        elif words[1] == "snapshot":
            assert set(words[2:]) <= set(snapshot_command.COMMANDS)
        elif words[1] == "data" and words[3:]:
            data_command.parse(words[2:])
        elif words[1] == "data":
            assert set(words[2:]) <= set(data_command.COMMANDS)
        return
    assert (ROOT / words[0]).is_file()
    given = [word for word in words[1:] if word != "--show"]
    if words[0] == "train.py" and given != ["--help"]:
        load_config(given)
    elif words[0] == "plan.py":
        load_config(plan.parse(given).overrides)
    elif words[0] == "sample.py":
        sample.parse(given)
    elif words[0] == "evaluate.py":
        evaluate.parse(given)
    elif words[0].startswith("benchmarks/"):
        options = {word for word in given if word.startswith("--")}
        sources = [(ROOT / words[0]).read_text(), (ROOT / "benchmarks" / "harness.py").read_text()]
        for option in options:
            assert any(f'"{option}"' in source for source in sources), option


def read_pytest(command: Command) -> None:
    words = command.words[1:]
    for word in words:
        assert (
            word.startswith("-") or words[words.index(word) - 1] == "-m" or (ROOT / word).exists()
        )
    for marker in words[words.index("-m") + 1].split() if "-m" in words else []:
        known = rf'^    "{re.escape(marker)}: '
        assert marker in ("not", "and", "or") or re.search(
            known, (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE
        ), marker


def read_pip(command: Command) -> None:
    words = command.words
    assert words[1] == "install"
    for flag, value in pairwise(words):
        # That of a Space is made by the command before it.
        assert flag != "-r" or value == "page/requirements.txt" or (ROOT / value).is_file()
    pinned = [word for word in words if word.startswith("torch==")]
    assert all(word in (ROOT / "requirements.txt").read_text().split() for word in pinned)


def read_sbatch(command: Command) -> None:
    words = [word for word in command.words[1:] if word != "..."]
    script = next(word for word in words if word.endswith(".sbatch"))
    assert (ROOT / script).is_file()
    task = "${oc.env:SLURM_ARRAY_TASK_ID}"
    load_config([word.replace(task, "1") for word in words[words.index(script) + 1 :]])


def read_attempts(words: list[str]) -> None:
    """What a container is given, for `python -m cloud.attempts`."""
    _, launch = attempts.parse(words)
    at = launch.index("train.py")
    options = dict(zip(launch[:at:2], launch[1:at:2], strict=True))
    assert (ROOT / options["--config_file"]).is_file()
    load_config(launch[at + 1 :])


def read_docker(command: Command) -> None:
    words = command.words[1:]
    image = images.read(ROOT / "cloud" / "Dockerfile")
    tag = "accelerate-gpt"
    if words[0] == "build":
        options = dict(zip(words[1:-1:2], words[2:-1:2], strict=True))
        assert options.pop("--file") == "cloud/Dockerfile"
        assert options.pop("--tag") == tag
        argument, _, value = options.pop("--build-arg", "TORCH_INDEX=").partition("=")
        assert argument in image.arguments
        assert value in ("", CPU_INDEX)
        assert (options, words[-1]) == ({}, ".")
    elif words[0] == "run":
        at = words.index(tag)
        with_value = {"--gpus": "all", "--shm-size": "4g", "--stop-timeout": "40"}
        with_value["--env"] = "HF_TOKEN"
        given = iter(words[1:at])
        for option in given:
            assert option == "--rm" or next(given) == with_value[option]
        if words[at + 1 :] != ["..."]:
            read_attempts(words[at + 1 :])
    else:
        assert words == ["stop"]


def read_kubectl(command: Command) -> None:
    words = command.words[1:]
    if words[:2] == ["apply", "-f"]:
        assert yaml.safe_load((ROOT / words[2]).read_text())["kind"] in ("Job", "JobSet")
    else:  # test_kubernetes.py compares it with what the manifests expect
        assert words[:3] == ["create", "secret", "generic"]


def read_sky(command: Command) -> None:
    words = command.words[1:]
    assert words[:2] == ["jobs", "launch"]
    task = yaml.safe_load((ROOT / words[2]).read_text())
    given = [word for word in words[3:] if word != "..."]
    for option, value in zip(given[::2], given[1::2], strict=True):
        name, _, content = value.partition("=")
        if option == "--env":
            assert name in task["envs"]
            load_config(content.split() if name == "WORDS" else [])
        elif option == "--secret":
            assert name in task["secrets"]
        else:
            assert (option, int(value)) == ("--num-nodes", 2)


def read_hf(command: Command) -> None:
    """`hf jobs` is read by the client's own parser; what a script is given, by the script's."""
    words = command.words[1:]
    if words[:3] != ["jobs", "uv", "run"] or "..." in words:
        assert words[:2] in (["auth", "login"], ["jobs", "uv"])
        return
    given = uv_app.commands["run"].make_context("run", words[3:]).params
    assert given["script"] == "cloud/hf_job.py"
    assert given["secrets"] == ["HF_TOKEN"]
    assert given["attempts"] > 1
    code, *arguments = given["script_args"]
    assert code == "code.tar.gz"
    read_attempts(arguments)


def read_git(command: Command) -> None:
    assert command.words == ["git", "archive", "--output", "code.tar.gz", "HEAD"]


def read_uv(command: Command) -> None:
    words = command.words[1:]
    if words[0] == "run":
        groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
        rest = words[1:]
        while rest[0].startswith("-"):
            taken = 2 if rest[0] == "--group" else 1
            assert rest[0] == "--no-sync" or rest[1] in groups
            rest = rest[taken:]
        inside = Command(command.page, shlex.join(rest))
        READERS[rest[0]](inside)
    elif words[:2] == ["pip", "install"]:
        assert words[2:4] == ["--torch-backend", "cpu"]
        read_pip(Command(command.page, shlex.join(["pip", "install", *words[4:]])))
    else:
        assert words in (["venv"], ["lock"])


def read_lm_eval(command: Command) -> None:
    """Another package: only the form of its arguments is known here."""
    words = command.words[1:]
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--model"] == "hf"
    assert given["--model_args"].startswith("pretrained=")
    assert "--tasks" in given


READERS = {
    "lm_eval": read_lm_eval,
    "accelerate": read_launch,
    "python": read_python,
    "pytest": read_pytest,
    "pip": read_pip,
    "sbatch": read_sbatch,
    "docker": read_docker,
    "git": read_git,
    "hf": read_hf,
    "kubectl": read_kubectl,
    "sky": read_sky,
    "uv": read_uv,
    "ruff": lambda command: None,
    "mypy": lambda command: None,
}
COMMANDS = [
    Command(command.page, part.strip())
    for page in PAGES
    for command in (*pages.shown_in(page), *pages.mentioned_in(page))
    for part in command.line.split("&&")
]


@pytest.mark.parametrize("command", list(dict.fromkeys(COMMANDS)), ids=str)
def test_every_command_is_one_that_its_program_takes(command):
    if command.line.startswith("accelerate config") or command.line == "accelerate launch":
        return
    READERS[command.words[0]](command)


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


def test_the_pages_on_the_code_name_definitions():
    text = text_of(DOCS / "how-the-code-is-organised.md") + text_of(DOCS / "one-step.md")
    assert len(re.findall(r"`[\w.]+` in \[", text)) >= 40


def test_the_calls_of_train_py_are_those_that_its_page_explains():
    explained = re.findall(r"`session\.(\w+)\(", text_of(DOCS / "how-the-code-is-organised.md"))
    assert len(explained) >= 7
    called = re.findall(r"\bsession\.(\w+)\(", (ROOT / "train.py").read_text())
    assert set(explained) <= set(called)


def test_the_tables_of_keys_are_the_schema_s():
    page = text_of(DOCS / "configuration.md")
    between = re.search(r"<!-- begin of (.*) -->\n(.*)\n<!-- end of \1 -->", page, flags=re.DOTALL)
    assert between is not None
    assert between[1] == "python -m config.help --markdown"
    assert between[2] == markdown()


def test_the_presets_are_those_that_there_are():
    assert set(PRESETS) == {path.stem for path in tracked("config/model", ".yaml")}


def has_test(file: str, name: str) -> bool:
    """Whether a test file has a test of this name, its own or one that it takes from another."""
    text = (TESTS / file).read_text()
    return re.search(rf"^(def {name}\(|    {name},$)", text, flags=re.MULTILINE) is not None


def test_every_fault_and_every_exit_code_has_its_test():
    rows = re.findall(r"^\|.*\| ([\w/]+): `(test_\w+)` \|$", text_of(FAULTS), flags=re.MULTILINE)
    assert len(rows) >= 55
    for file, name in rows:
        assert has_test(f"{file}.py", name), (file, name)


def test_every_row_of_the_faults_names_a_test_or_the_one_above():
    rows = re.findall(r"^\|.*\| ([^|]+) \|$", text_of(FAULTS).split("## Tested faults")[1], re.M)
    assert all(re.fullmatch(r"test|---|the same|[\w/]+: `test_\w+`", row) for row in rows)


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


def test_the_picture_of_a_run_is_one_and_is_small():
    (picture,) = re.findall(r"!\[.*\]\((.*\.png)\)", text_of(README))
    content = Path(ROOT / picture).read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 200_000
