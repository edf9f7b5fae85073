"""The metrics of the steps: collected on the device, read back only when they are due."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from config.schema import ConfigError
from data.prepared import CorpusInfo
from model.sharded import gather_full
from store.uploader import Uploader
from training.distributed.launcher import seconds_since_start
from training.distributed.processes import equal_on_all
from training.exits import TrainingStopped
from training.reporting.console import Console
from training.reporting.speed import PASSES, PhaseClock
from training.reporting.trackers import values_of

LOWER_RATE = (
    "A lower optim.learning_rate or a lower optim.max_grad_norm may carry it past this step."
)
OWN_NAMES = {"event", "step", "loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu"}
OWN_NAMES |= {"skipped", "hub_step", "hub_age_seconds", "hub_error"}
"""What a line of a step has already."""
LONGEST_SAMPLE = 4_000
"""Characters of a sample in metrics.jsonl: with each escaped, fewer than a line may have."""


@dataclass(frozen=True)
class Collected:
    """The figures of a step, which are still on the device."""

    step: int
    learning_rate: float
    loss: Tensor
    grad_norm: Tensor
    metrics: dict[str, Tensor]
    """What train.py measures besides, by name, each a number ()."""


@dataclass
class Report:
    """Collects the loss and the gradient norm of each step as tensors, and writes them as lines.

    Reading a tensor waits for the device, and reducing it waits for the other processes. So both
    happen only in `write`, for all steps since the last call.
    """

    console: Console
    tokens_per_step: int
    last_snapshot: Path | None
    """The newest snapshot that is on the disk as a whole; at first the one that is resumed."""
    skipped: int = 0
    """Steps of the run so far whose update fp16's loss scaler skipped."""
    max_skipped: int = 0
    uploads: Uploader | None = None
    track: Callable[..., object] = lambda values, step: None
    """`accelerator.log`, where a run has trackers."""

    def __post_init__(self) -> None:
        self.stall_seconds: list[float] = []
        """Seconds that each snapshot stalled the steps."""
        self.durable_seconds: list[float] = []
        """Seconds until each snapshot was on disk."""
        self.clock = PhaseClock(seconds_since_start())
        self.skipped_in_a_row = 0
        self.collected: list[Collected] = []
        """The steps since the last `write`."""
        self._names_compared = False
        self._seconds = 0.0
        """Seconds of the steps until the last call of `write`."""

    def add(
        self,
        step: int,
        learning_rate: float,
        loss: Tensor,
        grad_norm: Tensor,
        metrics: Mapping[str, float | Tensor] | None = None,
    ) -> None:
        """Add the metrics of a step: this process's mean loss, and the norm before clipping.

        `metrics` are this process's other ones, each one number. Raises ConfigError for the name of
        a figure that a line has already.
        """
        others = {}
        for name, value in (metrics or {}).items():
            if name in OWN_NAMES:
                raise ConfigError(
                    f"train.py gives session.finish_step a metric named {name!r} at step {step}, "
                    "which each line of metrics.jsonl has already: give it another name."
                )
            number = torch.as_tensor(value).detach().to(loss.device, torch.float32, copy=True)
            others[name] = number.reshape(())  # raises for more than one number
        self.collected.append(Collected(step, learning_rate, loss, grad_norm, others))
        self.console.step = step
        if self.console.bar is not None:
            self.console.bar.update(step - self.console.bar.n)
        self.clock.enter(PASSES)

    def write(self, accelerator: Accelerator) -> None:
        """Write a line for each step since the last call. Every process must call this.

        Raises TrainingStopped on all processes when a loss or a gradient norm is not finite. Under
        fp16, a gradient that overflows only means that the loss scaler has skipped the update.
        """
        if not self.collected:
            return
        collected, newest = self.collected, self.collected[-1]
        # Losses differ between processes; norms are of the common gradient.
        own_losses = torch.stack([of_step.loss for of_step in collected])
        losses = accelerator.reduce(own_losses.float(), "mean").tolist()
        whole_norms = [gather_full(of_step.grad_norm) for of_step in collected]
        norms = torch.stack(whole_norms).float().tolist()
        metrics = self._mean_metrics(accelerator)
        self.collected = []
        seconds = self.clock.seconds_of_steps - self._seconds
        speed = self.tokens_per_step * len(collected) / seconds
        measured = {"tokens_per_second": round(speed, 1)}
        if self.console.speed_at_peak is not None:
            measured["mfu"] = round(speed / self.console.speed_at_peak, 6)
        records, fault = [], None
        for of_step, loss, norm, others in zip(collected, losses, norms, metrics, strict=True):
            step = of_step.step
            skipped = accelerator.scaler is not None and not math.isfinite(norm)
            if (fault := self._fault(step, loss, norm, skipped)) is not None:
                break
            records.append(
                {
                    "event": "train",
                    "step": step,
                    "loss": loss,
                    "learning_rate": of_step.learning_rate,
                    "grad_norm": None if skipped else norm,
                    **measured,
                    **({"skipped": True} if skipped else {}),
                    # JSON has no word for a number that is not finite.
                    **{name: x if math.isfinite(x) else None for name, x in others.items()},
                }
            )
        hub_status = self._add_hub_status(records)
        self.record(records)
        if fault is not None:
            raise self._stopped(fault)
        # The width of a terminal may cut off the last: what went wrong comes first.
        words = [f"{self.skipped} skipped"] * bool(self.skipped) + [hub_status] * bool(hub_status)
        words += [f"norm {norms[-1]:.2f}", f"rate {newest.learning_rate:.2g}"]
        words += [f"{name} {value:.4g}" for name, value in metrics[-1].items()]
        seconds_left = (self.console.max_steps - newest.step) * seconds / len(collected)
        self.console.progress(newest.step, losses[-1], speed, seconds_left, words)
        self._seconds += seconds

    def _mean_metrics(self, accelerator: Accelerator) -> list[dict[str, float]]:
        """The other metrics of each collected step: means over the processes, all in one message.

        Every process must call this. Raises ConfigError, in the first call, where processes have
        other names: without a word, they would mix up their messages.
        """
        if not self._names_compared:
            self._names_compared = True
            names = str([(of_step.step, [*of_step.metrics]) for of_step in self.collected])
            if not equal_on_all(accelerator, names):
                raise ConfigError(
                    "train.py gives session.finish_step other metrics on one process than on "
                    "another. Give the same names at the same steps on all of them, in one order."
                )
        own = [gather_full(x) for of_step in self.collected for x in of_step.metrics.values()]
        if not own:
            return [{} for _ in self.collected]
        means = iter(accelerator.reduce(torch.stack(own), "mean").tolist())
        return [{name: next(means) for name in of_step.metrics} for of_step in self.collected]

    def held_out(self, step: int, loss: float, text: CorpusInfo) -> None:
        """Report an evaluation. Raises TrainingStopped when its loss is not finite."""
        if not math.isfinite(loss):
            raise self._stopped(f"the held-out loss is {loss} after step {step}")
        per_byte = text.bits_per_byte(loss)
        record = {"event": "eval", "step": step, "loss": loss}
        self.record([record if per_byte is None else record | {"bits_per_byte": per_byte}])
        words = "" if per_byte is None else f", {per_byte:.4f} bits per byte"
        self.console.say(f"step {step}: held-out loss {loss:.4f}{words}")

    def sample(self, step: int, text: str) -> None:
        """Report a text that the model has generated."""
        self.record([{"event": "sample", "step": step, "text": text[:LONGEST_SAMPLE]}])
        self.console.say(f"----- sample at step {step} -----\n{text.strip()}\n-----")

    def record(self, records: list[dict[str, Any]]) -> None:
        """Add lines to metrics.jsonl, and send them to the trackers."""
        if (file := self.console.metrics) is None:
            return
        fault_before = file.fault
        file.append(records)
        for record in records:
            self.track(values_of(record), step=record["step"])
        if file.fault is not None and fault_before is None:
            self.console.warn(f"metrics wait until they can be written: {file.fault}.")

    def flush(self) -> None:
        """Write all metrics to the disk. Raises OSError when the disk refuses them."""
        if self.console.metrics is not None:
            self.console.metrics.flush()

    def newest_snapshot(self) -> str:
        """Which snapshot the run can resume from, as a sentence."""
        if self.last_snapshot is None:
            return "There is no snapshot yet."
        return f"The last good snapshot stays: {self.last_snapshot}."

    def _add_hub_status(self, records: list[dict[str, Any]]) -> str:
        """Add the Hub's lag to the last record, print the uploader's messages, return the lag."""
        if self.uploads is None or not records:
            return ""
        for message in self.uploads.messages():
            self.console.warn(message)
        status = self.uploads.status()
        age = None if status.age_seconds is None else round(status.age_seconds, 1)
        records[-1] |= {
            "hub_step": status.step,
            "hub_age_seconds": age,
            "hub_error": status.failure_text,
        }
        return status.as_words()

    def _fault(self, step: int, loss: float, norm: float, skipped: bool) -> str | None:
        """Why the run cannot continue after a step; None when it can."""
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if not math.isfinite(loss):
            return f"the loss is {loss} at step {step}"
        if self.skipped_in_a_row > self.max_skipped:
            return (
                f"the gradient has overflowed fp16 in {self.skipped_in_a_row} steps in a row, up "
                f"to step {step}: more than train.max_skipped_steps={self.max_skipped}"
            )
        if not skipped and not math.isfinite(norm):
            return f"the gradient norm is {norm} at step {step}"
        return None

    def _stopped(self, what: str) -> TrainingStopped:
        """The error that ends a run whose numbers are not finite."""
        return TrainingStopped(
            f"{what}. {self.newest_snapshot()} {LOWER_RATE} If the run ends here again, begin "
            "another one with an earlier snapshot: run.name=<name> snapshot.resume=<its folder>."
        )
