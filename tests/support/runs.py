"""Real runs of train.py and sample.py as a user starts them, each with a deadline."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml
from safetensors.torch import load_file

import preload
from data.tokenizer import CharTokenizer
from model.gpt import GPT, GPTConfig
from preload import environment
from snapshot.disk.folder import read_json
from snapshot.disk.load import restore_weights

ROOT = Path(__file__).resolve().parents[2]
BESIDE = ROOT / "tests" / "support" / "beside.py"
ALTERED = ROOT / "tests" / "support" / "altered.py"
ON_CPU = ROOT / "tests" / "support" / "on_cpu.py"
WITH_BF16 = ("with", "train.py")
"""The first arguments of ON_CPU. On a CPU without bf16 instructions, torch then emulates them."""
DEADLINE_SECONDS = 600
"""Against a hang, not a slow machine: what is promised within seconds has a limit of its own."""
MODULE = [sys.executable, "-m", "snapshot"]

CONSTANT = ("optim.learning_rate=1e-3", "optim.min_learning_rate=1e-3")
"""A constant rate after the warm-up, so that a shorter run has the rates of a longer one."""


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
        "dynamo_backend": "NO",
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


def launch_command(
    config: str | Path,
    *arguments: str,
    options: tuple[str, ...] = (),
    script: Path = ROOT / "train.py",
) -> list[str]:
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
        str(script),
        *arguments,
    ]


def run(
    words: list[str],
    deadline: float = DEADLINE_SECONDS,
    forked: bool = True,
    code: int | None = None,
    **changes: str,
) -> subprocess.CompletedProcess:
    """Run a command to its end; at the deadline it is killed, with all that it started.

    With `code`, it must end with that exit code.
    """
    with started(words, forked=forked, **changes) as process:
        out, errors = process.communicate(timeout=deadline)
    assert code in (None, process.returncode), f"exit code {process.returncode}: {errors}"
    return subprocess.CompletedProcess(words, process.returncode, out, errors)


@contextlib.contextmanager
def started(
    words: list[str],
    into: Path | None = None,
    forked: bool = True,
    session: bool = False,
    **changes: str,
) -> Iterator[subprocess.Popen]:
    """A command that runs in the background, until the end of the test: then kill -9 for all of it.

    What a long run prints goes `into` a file: a pipe that nobody reads would fill up and block it.
    It is forked from a process that has imported all of it, where that is the same (see `preload`):
    a tenth of the time. `forked=False` starts Python, and a launcher, as a shell would. With a
    `session` of its own it is a process group, as a terminal's command is.
    """
    with contextlib.ExitStack() as stack:
        pipe: Any = subprocess.PIPE
        said = pipe if into is None else stack.enter_context(open(into, "w"))
        process = (preload.Process if forked else subprocess.Popen)(
            words,
            stdout=said,
            stderr=pipe if into is None else subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment(**changes),
            cwd=ROOT,
            start_new_session=session,
        )
        try:
            yield process
        finally:
            kill_all(process)
            for end in (process.stdout, process.stderr):
                if end is not None:
                    end.close()


def kill_all(process: subprocess.Popen) -> None:
    """kill -9 for a process and its descendants: a launcher's workers have their own sessions."""
    with contextlib.suppress(psutil.NoSuchProcess):
        alive = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for one in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()  # first: until its end is seen it stays, as a zombie
        psutil.wait_procs(alive)
    process.wait()


def workers(process: subprocess.Popen) -> dict[int, psutil.Process]:
    """The processes that a launcher has started, by their rank; those that are there right now."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                rank = child.environ().get("RANK")
                if rank is not None:
                    found[int(rank)] = child
    return found


def wait_until(
    holds: Callable[[], object], process: subprocess.Popen, deadline: float = DEADLINE_SECONDS
) -> None:
    """Wait until something holds; fails when the run ends before, or it takes longer."""
    end = time.monotonic() + deadline
    while not holds():
        assert process.poll() is None, f"ended before: {process.communicate()}"
        assert time.monotonic() < end, "did not happen before the deadline"
        time.sleep(0.02)


def newest_step(run_dir: Path) -> int:
    """The last whole line's step in metrics.jsonl; 0 where there is none."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def train(
    *overrides: str, forked: bool = True, code: int | None = None, **changes: str
) -> subprocess.CompletedProcess:
    """`python train.py` with the overrides."""
    return run(command(*overrides), forked=forked, code=code, **changes)


def launch(
    config: str | Path,
    *overrides: str,
    options: tuple[str, ...] = (),
    script: Path = ROOT / "train.py",
    forked: bool = True,
    code: int | None = None,
    **changes: str,
) -> subprocess.CompletedProcess:
    """`accelerate launch --config_file accelerate_configs/<config> train.py` with the overrides."""
    command = launch_command(config, *overrides, options=options, script=script)
    return run(command, forked=forked, code=code, **changes)


def metrics(run_dir: Path, event: str = "train") -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def losses(run_dir: Path) -> list[float]:
    """The training loss of each step, having checked that every step is there once, in order."""
    records = metrics(run_dir)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def losses_from(run_dir: Path, step: int) -> list[float]:
    """The training losses from a step on."""
    return [record["loss"] for record in metrics(run_dir) if record["step"] >= step]


def loaded(folder: Path) -> tuple[GPT, CharTokenizer]:
    """The model and the tokenizer of a snapshot."""
    model = GPT(GPTConfig.read(read_json(folder / "config.json"))).eval()
    restore_weights(folder, model)
    return model, CharTokenizer.load(folder)


def snapshot(run_dir: Path, step: int) -> Path:
    """The folder of a run's snapshot after `step`."""
    return run_dir / "snapshots" / f"step-{step:08d}"


def tensors(folder: Path) -> dict:
    """All weights and optimizer tensors of a snapshot."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        prefix = "optimizer " if path.name.startswith("optimizer") else ""
        found |= {f"{prefix}{name}": tensor for name, tensor in load_file(path).items()}
    return found


def assert_same_bits(one: Path, other: Path) -> None:
    """Two snapshots hold the same tensors, bit for bit."""
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    differing = [name for name in first if not first[name].equal(second[name])]
    assert differing == []


def relative_difference(one: list[float], other: list[float]) -> float:
    """The largest, of the losses of two runs with as many steps."""
    assert len(one) == len(other) > 0
    return max(abs(a - b) / a for a, b in zip(one, other, strict=True))
