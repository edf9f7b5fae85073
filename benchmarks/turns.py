"""Training loops in separate processes that take turns, so that results are paired."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import ROOT, launch

SCRIPT = "benchmarks/contestants.py"


class Contestant:
    """A process that computes only in its turns."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.output: list[str] = []
        self.seconds: list[float] = []
        """Seconds a step, for each turn."""
        self.memory = 0.0
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.facts = self._response()

    def run_steps(self, steps: int, warm_up: bool = False) -> float:
        """Run steps; returns the seconds a step."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        response = self._response()
        self.memory = response.get("memory", 0.0)
        seconds = response["seconds"] / steps
        if not warm_up:
            self.seconds.append(seconds)
        return seconds

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _response(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@ "):
                response: dict[str, Any] = json.loads(line[2:])
                return response
            self.output.append(line)
        sys.exit(f"{self.name} ended:\n" + "".join(self.output[-40:]))


def ours(
    name: str, accelerate_config: str, words: list[str], folder: Path, options: tuple[str, ...] = ()
) -> Contestant:
    """train.py under `accelerate launch`, as a user starts it, from the beginning."""
    shutil.rmtree(folder / name, ignore_errors=True)
    rest = [
        "train.max_steps=1000000000",
        "train.eval_every=1000000000",
        "train.sample_every=0",
        "snapshot.every=1000000000",
        "run.collective_timeout_seconds=3600",
        f"run.dir={folder / name}",
        f"data.cache_dir={folder / 'data'}",
    ]
    # Of two overrides of a key, the last one counts.
    return Contestant(
        name, launch(accelerate_config, SCRIPT, "ours", *rest, *words, options=options)
    )


def other(name: str, kind: str, settings: dict[str, Any]) -> Contestant:
    """Another training loop than train.py."""
    return Contestant(name, [sys.executable, str(ROOT / SCRIPT), kind, json.dumps(settings)])


def take_turns(contestants: list[Contestant], steps: int, turns: int, warm_up: int) -> None:
    """Give every contestant `turns` turns of `steps` steps, in alternating order."""
    for contestant in contestants:
        contestant.run_steps(warm_up, warm_up=True)
    for turn in range(turns):
        for contestant in contestants if turn % 2 else contestants[::-1]:
            contestant.run_steps(steps)
            print(
                f"turn {turn + 1}: {contestant.name}: {contestant.seconds[-1] * 1e3:.1f} ms",
                file=sys.stderr,
                flush=True,
            )
