"""Send a run to a tracker: while it trains, or afterwards, from the files in its directory.

python -m training.reporting.track out/python-docs --to trackio

A run with run.tracker starts this as a process of its own for each tracker. So a tracker that
fails, hangs or is slow costs the run nothing; and as the files hold every step once over all
restarts, so does the tracker's run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from filelock import FileLock
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.schema import Config, ConfigError, RunConfig
from data.public_names import public_config
from snapshot.disk.files import snapshot_folders, snapshots_in, write_whole
from snapshot.disk.state import read_state
from snapshot.errors import SnapshotError
from snapshot.start import METRICS
from store.events import Event, read_events
from store.records import EVENTS
from training.distributed.accelerator import check_installed
from training.distributed.environment import without_launcher
from training.reporting.console import Console
from training.reporting.metrics import Record, read_after

FOLDER = "trackers"
"""A folder of the run's directory: how far each tracker is, and what went wrong."""
EVERY_SECONDS = 1.0
LAST_SECONDS = 300.0
"""How long this process still sends after the end of its run, before it gives a tracker up."""
NICENESS = 10
MOST_BYTES = 4 << 20
"""How much of metrics.jsonl is read at once."""
Row = tuple[int, dict[str, Any]]
"""A step, and its figures and texts by name."""
ROOT = Path(__file__).parents[2]
END_SECONDS = 10.0
"""How long the end of a run waits for all of its trackers."""


def main(arguments: list[str]) -> int:
    """Send what the tracker does not have yet; the exit code: 2 for a user error."""
    options = parse(arguments)
    run_dir = Path(options.run)
    ended = threading.Event()
    if options.follow:
        os.nice(NICENESS)
        threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    else:
        ended.set()
    try:
        run_id = options.run_id or run_id_of(run_dir)
        send(run_dir, options.to, run_id, ended)
    except (ConfigError, SnapshotError, OSError, OmegaConfBaseException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def send(run_dir: Path, name: str, run_id: str, ended: threading.Event) -> None:
    """Send the rows of a run to a tracker, until the run has `ended` and all of them are sent.

    Raises ConfigError for a tracker that is not installed, and what the tracker raises.
    """
    PartialState(cpu=True)  # accelerate's logging needs it; a GPU is the run's
    check_installed([name])
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    with FileLock(folder / f"{name}.lock"):  # the process of the attempt before may still send
        cursor = Cursor(folder / f"{name}.json")
        # A tracker may be a service: the folders of this machine are none of its business.
        plain = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
        config = OmegaConf.create(public_config(cast("dict[str, Any]", plain)))
        tracker = open_tracker(name, run_dir, config, run_id, cursor.step)
        rows = Rows(run_dir, own_step(tracker, cursor.step), cursor.event)
        if rows.step == 0:
            store_config(tracker, config)
        while True:
            complete = ended.wait(EVERY_SECONDS)
            for step, row in rows.next(complete):
                tracker.log(row, step=step)
            cursor.write(rows.step, rows.event)
            if complete:
                break
        tracker.finish()


def open_tracker(name: str, run_dir: Path, config: Any, run_id: str, step: int) -> GeneralTracker:
    """accelerate's tracker of this name. All attempts are one run, if the tracker supports that.

    `step` is the last one that was sent.
    """
    run_name = str(config.run.name)
    project = str(config.run.get("project") or RunConfig.project)  # older runs have none
    options: dict[str, Any] = {}
    if name == "tensorboard":
        options = {"logging_dir": run_dir / FOLDER / name, "purge_step": step + 1}
        project = run_name
    elif name == "wandb":
        options = {"id": run_id, "name": run_name, "resume": "allow", "dir": run_dir / FOLDER}
    elif name == "trackio":
        options = {"name": f"{run_name}-{run_id[:8]}", "resume": "allow", "embed": False}
        options |= {"auto_log_cpu": False, "auto_log_gpu": False}  # rows without a step
    elif LOGGER_TYPE_TO_CLASS[name].requires_logging_directory:
        options = {"logging_dir": run_dir / FOLDER / name}
    tracker: GeneralTracker = LOGGER_TYPE_TO_CLASS[name](project, **options)
    tracker.start()
    return tracker


def own_step(tracker: GeneralTracker, sent: int) -> int:
    """The last step that the tracker has; `sent` where it cannot tell."""
    after = getattr(tracker.tracker, "_next_step", None)  # of trackio
    return sent if after is None else max(0, int(after) - 1)


class Cursor:
    """How far a tracker is: the last step and the last event that it has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.step = 0
        self.event: Event | None = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(path.read_text())
            self.step, self.event = int(found["step"]), found["event"]

    def write(self, step: int, event: Event | None) -> None:
        """Keep the new place. Raises OSError."""
        if (step, event) != (self.step, self.event):
            write_whole(self._path, json.dumps({"step": step, "event": event}))
            self.step, self.event = step, event


def store_config(tracker: GeneralTracker, config: Any) -> None:
    """Send the configuration by dotted key; to TensorBoard as a text, or it makes a second run."""
    if tracker.name == "tensorboard":
        tracker.log({"config": f"```yaml\n{OmegaConf.to_yaml(config)}```"}, step=0)
        return
    plain: dict[str, Any] = {
        f"{section}.{name}": value for section in config for name, value in config[section].items()
    }
    simple = (bool, int, float, str)
    tracker.store_init_configuration(
        {key: value if isinstance(value, simple) else str(value) for key, value in plain.items()}
    )


def run_id_of(run_dir: Path) -> str:
    """The id of a run from its newest snapshot. Raises SnapshotError without one."""
    for folder in snapshot_folders(snapshots_in(run_dir)):
        with suppress(SnapshotError):
            return read_state(folder).run_id
    raise SnapshotError(f"{run_dir} has no snapshot that can be read. Name a run's directory.")


def _wait_for_end(ended: threading.Event) -> None:
    """Wait until the run says that it ends, or its process is gone; then give up after a while."""
    with suppress(OSError, ValueError):
        os.read(sys.stdin.fileno(), 1)
    ended.set()
    _give_up_after(LAST_SECONDS, os._exit)


def _give_up_after(seconds: float, leave: Callable[[int], Any]) -> None:
    timer = threading.Timer(seconds, leave, (1,))
    timer.daemon = True
    timer.start()


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with 2 and a usage line for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m training.reporting.track", description="Send a run to a tracker."
    )
    parser.add_argument("run", help="the directory of a run")
    parser.add_argument("--to", required=True, help="tensorboard, trackio, wandb, ...")
    parser.add_argument("--follow", action="store_true", help="until the standard input ends")
    parser.add_argument("--run-id", help="default: that of the newest snapshot")
    return parser.parse_args(arguments)


class Rows:
    """The rows of a run's directory, each once, as the run adds them."""

    def __init__(self, run_dir: Path, step: int, event: Event | None) -> None:
        """Begin after `step`, and after `event` of events.jsonl."""
        self.step, self.event = step, event
        self._run_dir = run_dir

    def next(self, complete: bool) -> Iterator[Row]:
        """The rows since the last call, without the newest unless the run is `complete`.

        The evaluation of a step comes after its other figures, so a step is complete when the next
        one has begun. Raises OSError, and ConfigError if the file holds no metrics.
        """
        at_end = False
        while not at_end:
            records, at_end = read_after(self._run_dir / METRICS, self.step, MOST_BYTES)
            steps = [(step, list(of_it)) for step, of_it in groupby(records, itemgetter("step"))]
            known = steps if complete and at_end else steps[:-1]
            events = read_events(self._run_dir / EVENTS)
            for step, found in known:
                row = figures_of(found)
                if found[-1]["event"] == "sample":
                    row["sample"] = found[-1]["text"]
                self.step = step
                if new := self._events_up_to(step, events):
                    texts = [f"{event['time']} {event['event']} {event['text']}" for event in new]
                    row["events"] = "\n".join(map(str.rstrip, texts))
                    self.event = new[-1]
                yield step, row

    def _events_up_to(self, step: int, events: list[Event]) -> list[Event]:
        """The next events, up to the first of a later step."""
        begin = events.index(self.event) + 1 if self.event in events else 0
        return list(takewhile(lambda event: event["step"] <= step, events[begin:]))


def figures_of(records: list[Record]) -> dict[str, Any]:
    """The figures of the lines of one step: train/loss, eval/loss, ..."""
    return {
        f"{record['event']}/{name}": float(value) if isinstance(value, bool) else value
        for record in records
        for name, value in record.items()
        if name not in ("event", "step") and isinstance(value, int | float)
    }


class Trackers:
    """The processes that send a run to its trackers. Only the main process starts any."""

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
        """Warn once about each tracker that has failed."""
        for name in list(self._processes):
            if self._processes[name].poll() is not None:
                self._lost(name, "has failed")

    def end(self, seconds: float) -> None:
        """Let them send the rest, and wait at most so long."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
