"""The first hour with a GPU, in nine minutes: what only a CUDA device can show, on one of them.

    python benchmarks/gpu.py [--minutes 9] [--nanogpt <checkout of nanoGPT>]
    python benchmarks/gpu.py --rehearse

Measures the items of benchmarks/gpu_items.py, the most valuable first, and prints their tables.
benchmarks/results/gpu.json is written after each item. Started again, the command continues with
what is missing: items that are done are not repeated unless the code, the device or torch has
changed, or with `--again`. An item that fails, or exceeds its share of the time, is recorded with
its error and tried once more by the next start, after the others. `--rehearse` takes every path
with tiny shapes on the CPU, so that no GPU is needed to find a mistake.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from gpu_items import ITEMS, Item, Settings
from gpu_tables import print_tables
from harness import RESULTS, ROOT, as_words, kill_with_children, machine

EXIT_USER_MISTAKE, EXIT_TERMINATED = 2, 143
WORKER = (sys.executable, str(ROOT / "benchmarks" / "gpu_items.py"))
SOURCES = ("*.py", "*/*.py", "*/*/*.py", "accelerate_configs/*.yaml", "config/*/*.yaml")
REHEARSAL_SLACK = 4
"""How many times its share an item may take: a laptop has few cores for so many processes."""
LOG_CHARACTERS = 1500
"""Of the end of the log, which an error of the process shows."""


class Worker:
    """The process that measures, replaced by a new one after it has ended or was too slow."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self._command, self._log, self._environment = command, log, environment
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Its answer, or the error that there was none within so many seconds."""
        deadline = time.monotonic() + seconds
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return self._ended("the measuring process had ended")
        answer = b""
        while not answer.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return self._ended(f"it took longer than its share of {seconds:g} s")
            if not (part := os.read(process.stdout.fileno(), 1 << 16)):
                return self._ended("the measuring process ended")
            answer += part
        found: dict[str, Any] = json.loads(answer)
        return found

    def end(self) -> None:
        """Kill the process and all that it has started."""
        if self._process is not None:
            kill_with_children(self._process)
            self._process.communicate()  # closes the pipes
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            with open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._environment,
                )
        return self._process

    def _ended(self, why: str) -> dict[str, Any]:
        self.end()
        tail = self._log.read_bytes()[-LOG_CHARACTERS:].decode(errors="replace")
        return {"error": f"{why}\n{tail}"}


class Results:
    """The file with all results: by code, device and torch, and for each by item."""

    def __init__(self, path: Path, key: str, facts: dict[str, Any]) -> None:
        self._path = path
        self._all = json.loads(path.read_text()) if path.exists() else {}
        self.items: dict[str, Any] = self._all.setdefault(key, {"items": {}})["items"]
        self._all[key]["machine"] = facts

    def add(self, name: str, found: dict[str, Any]) -> None:
        """Write an item's rows, or its error; the file is whole at every moment."""
        self.items[name] = found
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".new")
        partial.write_text(json.dumps(self._all, indent=2) + "\n")
        partial.replace(self._path)

    def missing(self, items: Sequence[Item], again: bool) -> list[Item]:
        """The items to measure: those that were never tried, then those that failed."""
        if again:
            return list(items)
        fresh = [item for item in items if item.name not in self.items]
        return fresh + [item for item in items if "error" in self.items.get(item.name, {})]


def measure_all(
    items: Sequence[Item],
    worker: Worker,
    results: Results,
    settings: Settings,
    seconds: float,
    again: bool = False,
) -> None:
    """Measure what is missing, as long as half of an item's share fits into the time left."""
    deadline = time.monotonic() + seconds
    try:
        for item in results.missing(items, again):
            left = deadline - time.monotonic()
            if item.seconds > 2 * left:  # most items end much sooner
                print(f"{item.name}: left for the next start, {left:.0f} s are too few", flush=True)
                continue
            begun = time.monotonic()
            request = {"item": item.name, "settings": asdict(settings)}
            found = worker.ask(request, min(item.seconds, left))
            if "error" in found:  # after some errors of CUDA everything in the process fails
                worker.end()
            found["seconds"] = round(time.monotonic() - begun, 1)
            results.add(item.name, found)
            error = found.get("error", "").partition("\n")[0]
            result = f"failed: {error}" if "error" in found else "done"
            print(f"{item.name}: {result} in {found['seconds']} s", flush=True)
    finally:
        worker.end()


def code_digest() -> str:
    """A digest of the code: a commit's name is that of another one once results are written."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            folder = path.relative_to(ROOT).parts[0]
            if folder != "out" and not folder.startswith("."):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="at most; default: 9, rehearsed 45")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to compare with")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--again", action="store_true", help="repeat what is done")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results/gpu.json")
    parser.add_argument("--folder", type=Path, help="for texts, runs, logs; default: out/gpu")
    options = parser.parse_args(arguments)
    kind = "gpu-rehearsal" if options.rehearse else "gpu"
    options.folder = (options.folder or ROOT / "out" / kind).resolve()
    default = options.folder / "rehearsal.json" if options.rehearse else RESULTS / "gpu.json"
    options.results = options.results or default
    options.minutes = options.minutes or (45.0 if options.rehearse else 9.0)
    return options


def mistakes(options: argparse.Namespace) -> str:
    """A mistake of the user's as a sentence; empty if there is none."""
    if not options.rehearse and not torch.cuda.is_available():
        return "there is no CUDA device. With --rehearse every item runs on the CPU, in small."
    if options.nanogpt is not None and not (options.nanogpt / "model.py").is_file():
        return f"--nanogpt {options.nanogpt} has no model.py. Give the folder of a checkout."
    return ""


def main(arguments: list[str]) -> int:
    """Measure, print the tables, and return 0; 2 for a mistake in the arguments."""
    begun = psutil.Process().create_time()  # the imports take seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # ends the worker as well
    options = parse(arguments)
    if mistake := mistakes(options):
        print(f"error: {mistake}", file=sys.stderr)
        return EXIT_USER_MISTAKE
    options.folder.mkdir(parents=True, exist_ok=True)
    nanogpt = None if options.nanogpt is None else str(options.nanogpt.resolve())
    settings = Settings(str(options.folder), nanogpt, options.rehearse)
    environment = {**os.environ, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
    if options.rehearse:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment.setdefault("OMP_NUM_THREADS", "1")  # many processes on a few cores
    facts = machine()
    device = "the CPU, rehearsed" if options.rehearse else facts["gpu"]
    key = f"code {code_digest()}, {device}, torch {facts['torch']}"
    print(as_words(facts))
    results = Results(options.results, key, facts)
    worker = Worker(WORKER, options.folder / "worker.log", environment)
    seconds = 60 * options.minutes - (time.time() - begun)
    slack = REHEARSAL_SLACK if options.rehearse else 1
    items = [replace(item, seconds=slack * item.seconds) for item in ITEMS]
    measure_all(items, worker, results, settings, seconds, options.again)
    print_tables(ITEMS, results.items)
    print(f"\nwritten: {options.results}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
