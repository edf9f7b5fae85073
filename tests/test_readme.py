"""The README: its commands run, its table of keys is the schema's, its paths exist."""

from __future__ import annotations

import re
import shlex
import sys

import pytest
import yaml

import runs
from config.compose import load_config
from config.help import key_rows
from loopback_hub import LoopbackHub
from runs import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
]
LAUNCHES = [line for line in COMMANDS if "accelerate launch" in line]
ON_A_CPU = ("cpu.yaml", "ddp_cpu.yaml", "fsdp_cpu.yaml")


def parts_of(line: str) -> tuple[str, list[str]]:
    """The accelerate config file and the overrides of a launch."""
    words = shlex.split(line.split("&&")[-1])
    config = words[words.index("--config_file") + 1]
    return config, words[words.index("train.py") + 1 :]


def test_the_two_commands_on_top_do_all_of_their_set_up():
    assert COMMANDS[0].startswith("pip install -r requirements.txt && accelerate launch ")
    assert COMMANDS[1] == "pip install -r requirements-dev.txt && pytest"


@pytest.mark.parametrize("line", LAUNCHES)
def test_every_launch_names_a_config_file_that_exists_and_keys_that_hold(line):
    config, overrides = parts_of(line)
    assert yaml.safe_load((ROOT / config).read_text())["compute_environment"] == "LOCAL_MACHINE"
    load_config(overrides)


@pytest.mark.parametrize(
    "line", [line for line in LAUNCHES if parts_of(line)[0].rsplit("/", 1)[-1] in ON_A_CPU]
)
def test_every_launch_on_a_cpu_trains(line, text_file, tmp_path):
    config, overrides = parts_of(line)
    (tmp_path / "books").mkdir()
    here = {"my.txt": text_file, "books/*.txt.gz": text_file, "chats.jsonl": text_file}
    taken = []
    for override in overrides:
        key, value = override.split("=", 1)
        if key == "train.max_steps":
            continue
        if key == "data.source":
            value = here.get(value.strip('"'), value)
        taken.append(f"{key}={value}")
    if any("shakespeare" in override for override in taken):  # its text is behind an address
        taken.append(f"data.source={text_file}")
    with LoopbackHub(tmp_path / "hub") as hub:
        result = runs.launch(
            config.rsplit("/", 1)[-1],
            *taken,
            "train.max_steps=2",
            "train.eval_batches=1",
            f"run.dir={tmp_path / 'run'}",
            f"data.cache_dir={tmp_path / 'cache'}",
            **hub.environment(),
        )
        assert result.returncode == 0, result.stderr
        assert "Generate text:" in result.stdout
        if any(override.startswith("hub.") for override in taken):
            look_into_the_repo(hub)


def look_into_the_repo(hub: LoopbackHub) -> None:
    """The commands that the README gives for a repo."""
    lines = [line for line in COMMANDS if "me/run" in line and line.startswith("python ")]
    assert len(lines) == 3
    for line in lines:
        words = ["on " if word == "The " else word for word in shlex.split(line)[1:]]
        result = runs.run([sys.executable, *words], **hub.environment())
        assert result.returncode == 0, result.stderr
        assert result.stdout


def test_the_sample_command_speaks(finished_run):
    line = next(line for line in COMMANDS if line.startswith("python sample.py"))
    words = [str(finished_run) if word == "out/python-docs" else word for word in shlex.split(line)]
    words = ["on " if word == "The " else word for word in words]
    result = runs.run([sys.executable, *words[1:]])
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) == len("on ") + 300 + len("\n")


def test_the_plan_is_what_the_readme_shows():
    (line,) = (line for line in COMMANDS if line.startswith("python plan.py"))
    result = runs.run([sys.executable, str(ROOT / "plan.py"), *shlex.split(line)[2:]])
    assert result.returncode == 0, result.stderr
    assert f"```\n{result.stdout}```" in README


def test_the_table_of_keys_is_the_schema_s():
    rows = [f"| `{key}` | `{default}` | {meaning} |" for key, default, meaning in key_rows()]
    found = [line for line in README.splitlines() if re.match(r"\| `\w+\.(?!yaml)\w+` \|", line)]
    assert found == rows


def test_every_fault_that_the_readme_tells_of_has_its_test():
    rows = re.findall(r"^\|.*\| (\w+): `(test_\w+)` \|$", README, flags=re.MULTILINE)
    assert len(rows) >= 25
    for file, name in rows:
        assert f"def {name}(" in (ROOT / "tests" / f"{file}.py").read_text(), (file, name)


def test_every_accelerate_config_and_every_room_is_in_the_readme():
    for path in (ROOT / "accelerate_configs").iterdir():
        assert f"`{path.name}`" in README
    for target in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / target).exists(), target
