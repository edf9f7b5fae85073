"""Contestants in processes of their own that take turns, a few steps each: pairs of one run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT, launch

SCRIPT = "benchmarks/contestants.py"


class Contestant:
    """A process that computes only when it is asked to."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.said: list[str] = []
        self.seconds: list[float] = []
        """Of each turn, a step."""
        self.memory = 0.0
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.facts = self._answer()

    def take(self, steps: int, warm_up: bool = False) -> float:
        """Seconds a step, of `steps` of them."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.memory = answer.get("memory", 0.0)
        seconds = answer["seconds"] / steps
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

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@ "):
                answer: dict[str, Any] = json.loads(line[2:])
                return answer
            self.said.append(line)
        sys.exit(f"{self.name} ended:\n" + "".join(self.said[-40:]))


def ours(
    name: str, accelerate_config: str, words: list[str], folder: Path, options: tuple[str, ...] = ()
) -> Contestant:
    """train.py through `accelerate launch`, as a user would start it."""
    rest = [
        "train.max_steps=1000000000",
        "train.eval_every=1000000000",
        "train.sample_every=0",
        "snapshot.every=1000000000",
        "snapshot.resume=never",
        "run.collective_timeout_seconds=3600",
        f"run.dir={folder / name}",
        f"data.cache_dir={folder / 'data'}",
    ]
    # A word given twice counts as it was given last.
    return Contestant(
        name, launch(accelerate_config, SCRIPT, "ours", *rest, *words, options=options)
    )


def other(name: str, kind: str, settings: dict[str, Any]) -> Contestant:
    """A contestant that is not ours."""
    return Contestant(name, [sys.executable, str(ROOT / SCRIPT), kind, json.dumps(settings)])


def take_turns(contestants: list[Contestant], steps: int, turns: int, warm_up: int) -> None:
    """Every contestant a turn of `steps`, `turns` times, each time in the other order."""
    for contestant in contestants:
        contestant.take(warm_up, warm_up=True)
    for turn in range(turns):
        for contestant in contestants if turn % 2 else contestants[::-1]:
            contestant.take(steps)
            print(
                f"turn {turn + 1}: {contestant.name}: {contestant.seconds[-1] * 1e3:.1f} ms",
                file=sys.stderr,
                flush=True,
            )
