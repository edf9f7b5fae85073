"""The trackers of an attempt: a process for each, which follows what the run writes."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from config.schema import Config
from training.distributed.environment import without_launcher
from training.reporting.console import Console
from training.reporting.track import FOLDER

ROOT = Path(__file__).parents[2]
END_SECONDS = 10.0
"""How long the end of a run waits for all of its trackers."""


class Trackers:
    """The processes that send a run to its trackers. Only the main process has some."""

    def __init__(self, console: Console, config: Config, run_id: str, shown: bool) -> None:
        """Start them. A tracker that cannot be started costs a warning."""
        self._console, self._folder = console, Path(config.run.dir) / FOLDER
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in config.run.tracker or [] if shown else []:
            words = [config.run.dir, "--to", name, "--follow", "--run-id", run_id]
            try:
                self._folder.mkdir(exist_ok=True)
                with open(self._log(name), "ab") as log:
                    self._processes[name] = subprocess.Popen(
                        [sys.executable, "-m", "training.reporting.track", *words],
                        stdin=subprocess.PIPE,  # ends when this process ends, whatever ends it
                        stdout=log,
                        stderr=log,
                        env=without_launcher(ROOT),
                        start_new_session=True,  # Ctrl-C is for the run, which tells them
                    )
            except OSError as error:
                console.warn(f"run.tracker={name} cannot be started: {error}.")

    def check(self) -> None:
        """Say once of each tracker that it has failed."""
        for name in list(self._processes):
            if self._processes[name].poll() is not None:
                self._lost(name, "has failed")

    def end(self, seconds: float) -> None:
        """Have them send the rest, and wait at most so long."""
        self.check()
        for process in self._processes.values():
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.write(b"end")  # workers that read data may hold the pipe open, too
                process.stdin.close()
        until = time.monotonic() + min(END_SECONDS, seconds)
        for name, process in list(self._processes.items()):
            try:
                if process.wait(max(0.0, until - time.monotonic())):
                    self._lost(name, "has failed")
            except subprocess.TimeoutExpired:
                self._lost(name, "has not sent everything yet, and continues in the background")
        self._processes.clear()

    def _lost(self, name: str, how: str) -> None:
        del self._processes[name]
        run_dir = self._folder.parent
        self._console.warn(
            f"run.tracker={name} {how} ({self._log(name)}). Every step is in metrics.jsonl; send "
            f"them again with: python -m training.reporting.track {run_dir} --to {name}"
        )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"
