"""The session of a trace: a few steps of the loop, profiled; nothing is saved or uploaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from accelerate.utils import ProfileKwargs
from torch.profiler import record_function

from config.compose import load_config
from config.schema import Config, ConfigError
from snapshot.disk.folder import snapshot_folders, snapshots_in
from tracing.collectives import Event, collectives_of
from training.exits import EXIT_DONE
from training.run.session import Session

STEPS = 3
"""Number of profiled steps; the table is of the last."""
NEVER = 10**9
TRACE, PART = "trace.json", "profile_{}.json"
"""The trace of all processes, and accelerate's name for that of one."""


def load_traced_config(arguments: list[str]) -> Config:
    """The configuration of a trace: that of train.py, in a directory next to the run's own.

    Raises ConfigError as `load_config` does.
    """
    config = load_config(arguments)
    config.run.dir = f"{config.run.dir}-trace"
    if snapshot_folders(snapshots_in(Path(config.run.dir))):  # a trace saves none
        what = f"a trace would be written to {config.run.dir}, which holds a run with snapshots"
        raise ConfigError(f"{what}. Name another run.dir.")
    config.run.tracker, config.hub.repo_id, config.hub.url = (None,) * 3
    config.snapshot.resume, config.snapshot.every = "auto", NEVER
    config.snapshot.every_minutes = config.run.max_minutes = None
    config.train.eval_every, config.train.sample_every, config.train.log_every = NEVER, 0, NEVER
    config.train.max_steps = max(config.train.max_steps, STEPS + 1)
    return config


class TracedSession(Session):
    """A session that profiles the first steps and ends."""

    def steps(self) -> Iterator[int]:
        """The profiled steps."""
        # The profiler's C++ logger (USDT:..., STAGE:...) reads its level at the first profile only.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        handler = ProfileKwargs(record_shapes=True, output_trace_dir=self.config.run.dir)
        with self.accelerator.profile(handler):  # each process writes its trace
            for step in islice(super().steps(), STEPS):
                self._step = f"step {step}"
                with record_function(self._step):
                    yield step

    def save(self) -> None:
        """A trace that is stopped leaves no snapshot either."""

    def end(self) -> int:
        """Join the traces and print the collectives of the last step; the exit code."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            folder = Path(self.config.run.dir)
            own = join_traces(folder)
            if found := collectives_of(own, self._step):
                self.console.say(f"{'collective':<16}{'calls':>7}{'bytes':>17}")
            for kind, (calls, size) in found.items():
                self.console.say(f"{kind:<16}{calls:>7,}{size:>17,}")
            self.console.say(f"\ntrace     {folder / TRACE}, for https://ui.perfetto.dev")
            self.console.close()
        self.accelerator.end_training()
        return self._agreement.exit_code if self._due.end else EXIT_DONE


def join_traces(folder: Path) -> list[Event]:
    """Write trace.json from the traces of all processes of this machine; the first one's events."""
    paths = sorted(folder.glob(PART.format("*")))
    first, *others = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    events = [event for trace in (first, *others) for event in trace["traceEvents"]]
    content = json.dumps({**first, "traceEvents": events})
    (folder / TRACE).write_text(content, encoding="utf-8")
    for path in paths:
        path.unlink()
    return list(first["traceEvents"])
