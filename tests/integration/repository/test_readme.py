"""The commands of the README and of docs/ run. What else the pages say: test_docs.py."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import families
import hubs
import pages
import real_models
import runs
from loopback_hub import LoopbackHub
from pages import LAUNCHES, README, SHOWN, launched_by, script_of
from runs import ROOT
from stream_data import publish_dataset

GPT2 = "openai-community/gpt2"
ON_A_CPU = ("cpu.yaml", "ddp_cpu.yaml", "fsdp_cpu.yaml", "fsdp_hybrid_cpu.yaml")
ON_A_CPU += ("cp_cpu.yaml", "tp_cpu.yaml", "fsdp_tp_cpu.yaml")
ON_THIS_CPU = [
    command for command in LAUNCHES if launched_by(command)[0].rsplit("/", 1)[-1] in ON_A_CPU
]


def test_the_two_commands_on_top_do_all_of_their_set_up():
    first, second, *_ = pages.shown_in(README)
    assert first.line.startswith("pip install -r requirements.txt && accelerate launch ")
    assert second.line == "pip install -r requirements-dev.txt && pytest"


def test_a_launch_of_every_config_for_cpus_is_run():
    assert {launched_by(command)[0] for command in ON_THIS_CPU} == {
        f"accelerate_configs/{name}" for name in ON_A_CPU
    }
    assert len(ON_THIS_CPU) >= 11


SAID = {"train.py": "Generate text:", "trace.py": "trace.json", "prove.py": "0 red"}
"""What the output of a script has."""


def marks(command: pages.Command) -> list[pytest.MarkDecorator]:
    """The commands of other pages are much like the README's. test_prove.py has a proof in CI."""
    quick = command.page == README and script_of(command) != "prove.py"
    return [] if quick else [pytest.mark.slow]


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=marks(command), id=str(command)) for command in ON_THIS_CPU],
)
def test_every_launch_on_a_cpu_trains(command, text_file, finished_run, tmp_path):
    config, overrides = launched_by(command)
    (tmp_path / "books").mkdir()
    lines = text_file.read_text().splitlines()
    rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (tmp_path / "chats.jsonl").write_text(rows)
    here = {"my.txt": text_file, "books/*.txt.gz": text_file, "chats.jsonl": text_file}
    taken = []
    for override in overrides:
        key, value = override.split("=", 1)
        if key == "train.max_steps":
            continue
        if key == "data.source":
            value = here.get(value.strip('"'), value)
        if key == "hub.url":  # S3 and a shared folder
            folder = tmp_path / value.partition("://")[2].strip("/")
            folder.parent.mkdir(parents=True)
            value = f"file://{folder}"
        if value == "mixture":  # a folder that the page says how to make
            (content,) = re.findall(
                r"^```json\n(.*?)^```", pages.text_of(command.page), re.M | re.S
            )
            (tmp_path / value).mkdir()
            (tmp_path / value / "config.json").write_text(content)
            value = str(tmp_path / value)
        if key == "data.mix":
            value = value.replace("chats/*.jsonl", str(tmp_path / "*.jsonl"))
        if value == "my-llama":
            value = str(families.make("llama", tmp_path / value, max_position_embeddings=64))
        if value == "out/python-docs":
            value = str(finished_run)
            taken.append("data.block_size=16")  # its context
        taken.append(f"{key}={value}")
    if any("shakespeare" in override for override in taken):  # its text is behind an address
        taken.append(f"data.source={text_file}")
    with LoopbackHub() as hub:
        if GPT2 in command.line:
            small = real_models.make("gpt2", tmp_path / "gpt2", n_positions=64)
            hubs.publish(hub, GPT2, small)
        if "owner/name" in command.line:
            hub.create("datasets/owner/name", private=False)
            publish_dataset(hub, {"data/train.jsonl": rows.encode()}, "owner/name")
        launched = runs.launch_command(
            config.rsplit("/", 1)[-1],
            *taken,
            "train.max_steps=2",
            "optim.warmup_steps=1",
            "train.eval_batches=1",
            f"run.dir={tmp_path / 'run'}",
            f"data.cache_dir={tmp_path / 'cache'}",
            script=ROOT / script_of(command),
        )
        result = runs.run(launched, **hub.environment(), HF_HOME=str(tmp_path / "cache"), code=0)
        assert SAID[script_of(command)] in result.stdout
        if command == SHOWN[0]:
            assert_shown_in_the_readme(result.stdout, tmp_path / "run")
        if "hub.repo_id=me/run" in taken:
            look_into_the_repo(hub, tmp_path)


def assert_shown_in_the_readme(output: str, run_dir: Path) -> None:
    """The lines of a run are those of the README, but for their numbers."""

    def without_numbers(text: str) -> list[str]:
        return re.sub(r"\d+([.,]\d+)*(e-\d+)?(k(?= tokens))?", "#", text).splitlines()

    heads = ("text ", "model ", "step ", "run ", "held out ", "snapshot ", "curves ")
    heads += ("Generate", "Continue")
    shown = set(without_numbers(pages.text_of(README)))
    lines = without_numbers(output.replace(str(run_dir), "out/python-docs"))
    lines = [line.replace("over # of #", "over all #") for line in lines]  # train.eval_batches=1
    compared = [line for line in lines if line.startswith((*heads, " " * 19))]
    assert {line.split()[0] for line in compared} >= {head.split()[0] for head in heads}
    assert [line for line in compared if line not in shown] == []


def look_into_the_repo(hub: LoopbackHub, folder: Path) -> None:
    """The commands that the page about the Hub gives for a repo."""
    lines = [one.line for one in SHOWN if one.page.name == "hub.md" and " me/run" in one.line]
    lines = [line for line in lines if line.startswith("python ")]
    assert len(lines) == 4
    others = {"The ": "on ", "page": str(folder / "page")}
    for line in lines:
        words = [others.get(word, word) for word in shlex.split(line)[1:]]
        result = runs.run([sys.executable, *words], **hub.environment(), code=0)
        assert result.stdout


@pytest.mark.parametrize("what", ["sample.py", "-m snapshot list", "-m snapshot verify"])
def test_the_commands_for_a_run_here_work(finished_run, what):
    (line,) = (
        one.line
        for one in SHOWN
        if one.line.startswith(f"python {what} ") and "out/python-docs" in one.line
    )
    words = [str(finished_run) if word == "out/python-docs" else word for word in shlex.split(line)]
    words = ["on " if word == "The " else word for word in words]
    result = runs.run([sys.executable, *words[1:]], code=0)
    assert result.stdout
    if what == "sample.py":
        assert len(result.stdout) == len("on ") + 300 + len("\n")


@pytest.mark.slow
def test_the_plan_is_what_its_page_shows():
    plans = [one for one in SHOWN if one.line.startswith("python plan.py")]
    (command,) = (one for one in plans if one.page.name == "parallelism.md")
    result = runs.run([sys.executable, str(ROOT / "plan.py"), *command.words[2:]], code=0)
    assert f"```\n{result.stdout}```" in pages.text_of(command.page)
