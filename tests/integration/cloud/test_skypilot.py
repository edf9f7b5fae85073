"""cloud/skypilot.yaml: its commands on machines that are one."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import yaml

import runs
from cloud import attempts
from config.compose import load_config
from training import exits

FILE = runs.ROOT / "cloud" / "skypilot.yaml"


def machine(rank: int, python: str = sys.executable, **changes: str) -> list[str]:
    """The file's `run` on one of two machines, with a Python in the place of .venv's."""
    given = {
        **{name: str(value) for name, value in yaml.safe_load(FILE.read_text())["envs"].items()},
        "REPO": "me/run",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_NUM_NODES": "2",
        **changes,
    }
    script = yaml.safe_load(FILE.read_text())["run"].replace(".venv/bin/python", python)
    return ["env", *(f"{name}={value}" for name, value in given.items()), "bash", "-c", script]


@pytest.mark.thorough
def test_each_machine_starts_the_attempts_with_its_rank():
    shows = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    words = machine(1, shows, WORDS="model=gpt2 train.max_steps=5")
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    module, name, *arguments = json.loads(shown.stdout)
    assert (module, name) == ("-m", "cloud.attempts")
    options, launch = attempts.parse(arguments)
    assert (options.restarts > 0, options.notice) == (True, "auto")
    at = launch.index("train.py")
    given = dict(zip(launch[:at:2], launch[1:at:2], strict=True))
    assert (runs.ROOT / given["--config_file"]).is_file()
    assert given["--machine_rank"] == "1"
    assert given["--num_machines"] == given["--num_processes"] == "2"
    assert given["--main_process_ip"] == "127.0.0.1"
    config = load_config(launch[at + 1 :])
    assert (config.hub.repo_id, config.train.max_steps) == ("me/run", 5)


def test_skypilot_takes_another_machine_after_75_alone():
    recovery = yaml.safe_load(FILE.read_text())["resources"]["job_recovery"]
    assert recovery == {"recover_on_exit_codes": [exits.EXIT_AGAIN], "max_restarts_on_errors": 0}
    assert "--again-elsewhere" in yaml.safe_load(FILE.read_text())["run"]


@pytest.mark.slow
def test_two_machines_train_with_these_commands(small, tmp_path, hub):
    config = runs.rehearsal("ddp_multinode.yaml", tmp_path, 1, num_machines=2, num_processes=2)
    port = re.search(r"--main_process_port=(\d+)", " ".join(runs.launch_command(config)))
    both = []
    for rank in (0, 1):
        keys = " ".join([*small, "train.max_steps=20", f"run.dir={tmp_path / str(rank)}"])
        words = machine(rank, CONFIG=str(config), WORDS=keys)
        both.append([word.replace("29500", port[1]) for word in words])
    with (
        runs.started(both[0], tmp_path / "said-0", forked=False, **hub.environment()) as first,
        runs.started(both[1], tmp_path / "said-1", forked=False, **hub.environment()) as second,
    ):
        codes = [process.wait(120) for process in (first, second)]
    said = [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)]
    assert codes == [exits.EXIT_DONE, exits.EXIT_DONE], said
    assert "machine   2 processes" in said[0]
    assert runs.newest_step(tmp_path / "0") == 20
