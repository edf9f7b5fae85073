"""Shared by the benchmarks: description of the machine, tables, and JSON results."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"

SHAPES: dict[str, dict[str, int]] = {
    "small": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch": 12},
    "large": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch": 8},
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "batch": 16},
}

LEARNING_RATE = 1e-3
"""The same for all trainers: some processors slow down where attention becomes sharp."""


def overrides(shape: dict[str, int], dropout: float = 0.0) -> list[str]:
    """The overrides of train.py for a shape."""
    words = [f"model.{name}={shape[name]}" for name in ("n_layer", "n_head", "n_embd")]
    words += [f"data.block_size={shape['block_size']}", f"model.dropout={dropout}"]
    words += ["model.activation_function=gelu", "optim.name=adamw"]  # as the other trainers have
    words += [f"optim.learning_rate={LEARNING_RATE}"]
    return [*words, f"train.global_batch_size={shape['batch']}"]


def launch(
    config: str, script: str, *words: str, options: Sequence[str] = (), root: Path = ROOT
) -> list[str]:
    """The `accelerate launch` command for a script of a checkout, with a shipped config file."""
    file = str(root / "accelerate_configs" / config)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file]
    return [*command, *options, str(root / script), *words]


def flops_per_token(parameters: int, shape: dict[str, int]) -> float:
    """As model.flops_per_token, for a GPT of whose parameters only the number
    is known.
    """
    matrices = parameters - shape["block_size"] * shape["n_embd"]
    return 6 * matrices + 12 * shape["n_layer"] * shape["n_embd"] * shape["block_size"]


def machine() -> dict[str, Any]:
    """The hardware and software that the results depend on."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit_of(ROOT),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "unset"),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def commit_of(root: Path) -> str:
    """The commit of a checkout; empty where it has none, or there is no git."""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=7"]
    with contextlib.suppress(OSError):
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    relevant = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{names[0] if names else platform.machine()} ({', '.join(relevant)})"


def as_words(found: dict[str, Any]) -> str:
    """The machine as one line of text."""
    return ", ".join(f"{name} {value}" for name, value in found.items())


def kill_with_children(process: subprocess.Popen[Any]) -> None:
    """kill -9 for a process and all that it has started; returns when they are gone."""
    children: list[psutil.Process] = []
    if process.poll() is None:  # otherwise its number may be another's by now
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.kill()
    process.wait()  # before psutil would, which takes the exit code away
    psutil.wait_procs(children, timeout=10)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median, minimum and maximum."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table for benchmarks/RESULTS.md."""
    print(markdown_table(headers, rows), end="")


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def save(name: str, figures: Any) -> None:
    """Write benchmarks/results/<name>.json: the machine, the command and the figures."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    given = [re.sub("^/.*", "<path>", re.sub("=/.*", "=<checkout>", word)) for word in sys.argv[1:]]
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *given])
    content = {"machine": machine(), "command": command, "figures": figures}
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written: {path.relative_to(ROOT)}")
