"""Real runs of train.py and sample.py as a user starts them, each with a deadline."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_SECONDS = 120


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, quiet and offline."""
    return {**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", **changes}


def command(*arguments: str, script: str = "train.py") -> list[str]:
    """One process, without a launcher: the exit code is the script's own."""
    return [sys.executable, str(ROOT / script), *arguments]


def rehearsal(config: str, folder: Path, processes: int, **changes: object) -> Path:
    """A shipped config file with only the machine changed: so many processes on this one's CPU.

    `changes` are entries of any level, for files that a user might have written.
    """
    content = yaml.safe_load((ROOT / "accelerate_configs" / config).read_text())
    here = {
        "use_cpu": True,
        "gpu_ids": ",".join(["-1"] * processes),
        "num_machines": 1,
        "num_processes": processes,
        "mixed_precision": "no",
    }
    for entry in ("main_process_ip", "main_process_port", "rdzv_backend", "same_network"):
        content.pop(entry, None)
    for name, value in {**here, **changes}.items():
        sections = (f"{word}_config" for word in ("fsdp", "parallelism", "dynamo"))
        section = next((s for s in sections if name.startswith(s.removesuffix("config"))), None)
        (content if section is None else content.setdefault(section, {}))[name] = value
    path = folder / f"{processes}-{config}"
    path.write_text(yaml.safe_dump(content))
    return path


def launch_command(config: str | Path, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    """`accelerate launch` with a shipped or given config file, on a port of its own."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(ROOT / "accelerate_configs" / config),
        f"--main_process_port={port}",
        *options,
        str(ROOT / "train.py"),
        *arguments,
    ]


def run(
    words: list[str], deadline: float = DEADLINE_SECONDS, **changes: str
) -> subprocess.CompletedProcess:
    """Run a command to its end, in a session of its own that is killed at the deadline."""
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=deadline,
        env=environment(**changes),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )


def train(*overrides: str, **changes: str) -> subprocess.CompletedProcess:
    """`python train.py` with the overrides."""
    return run(command(*overrides), **changes)


def launch(config: str | Path, *overrides: str, options: tuple[str, ...] = ()):
    """`accelerate launch --config_file accelerate_configs/<config> train.py` with the overrides."""
    return run(launch_command(config, *overrides, options=options))


def metrics(run_dir: Path, event: str = "train") -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def losses(run_dir: Path) -> list[float]:
    """The training loss of each step, having checked that every step is there once, in order."""
    records = metrics(run_dir)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def snapshot(run_dir: Path, step: int) -> Path:
    """The folder of a run's snapshot after `step`."""
    return run_dir / "snapshots" / f"step-{step:08d}"


def tensors(folder: Path) -> dict:
    """All weights and optimizer tensors of a snapshot."""
    return {
        **load_file(folder / "model.safetensors"),
        **{f"optimizer {k}": v for k, v in load_file(folder / "optimizer.safetensors").items()},
    }


def assert_same_bits(one: Path, other: Path) -> None:
    """Two snapshots hold the same tensors, bit by bit."""
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    differing = [name for name in first if not first[name].equal(second[name])]
    assert differing == []
