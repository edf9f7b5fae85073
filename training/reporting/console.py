"""What a run says: lines on the console, a progress bar, and lines on what happened to the run.

Output that cannot be written never ends the run.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from common.printable import shown
from training.reporting.metrics import MetricsFile

BAR = "{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"


class LossyFile(io.FileIO):
    """A file descriptor that drops what it cannot write at once.

    A full disk, or a reader or a terminal that is gone, must not end a run.
    """

    def write(self, content: Any, /) -> int:
        with suppress(OSError):
            return super().write(content) or len(content)  # None if it would have to wait
        return len(content)


def make_output_lossy() -> None:
    """Put sys.stdout and sys.stderr on `LossyFile`s, whole lines at once, in any encoding."""
    while os.open(os.devnull, os.O_RDWR) <= 2:
        pass  # closed by who started this process: another file would get what libraries write
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115  # None: closed
        with suppress(OSError):
            stream.flush()
        lossy = io.TextIOWrapper(
            io.BufferedWriter(LossyFile(stream.fileno(), "w", closefd=False)),
            encoding=stream.encoding,
            errors="backslashreplace",  # a character that the terminal lacks
            line_buffering=True,
        )
        lossy.replaced = stream  # type: ignore[attr-defined]  # or its end would close the file
        setattr(sys, name, lossy)


def write_now(text: str, seconds: float) -> None:
    """Write to stderr if that is possible in time: its terminal or reader may have stopped.

    `print` could block: the main thread may hold the stream while it waits for that reader.
    """
    with suppress(OSError, ValueError, AttributeError):
        number = sys.stderr.fileno()
        if select.select([], [number], [], seconds)[1]:
            os.write(number, text.encode())


@dataclass
class Console:
    """Prints lines to stdout, and progress as a bar at a terminal, otherwise as lines."""

    shown: bool
    """Whether this process prints."""
    max_steps: int
    step: int
    """The step that the run resumes from."""

    def __post_init__(self) -> None:
        self.bar: tqdm | None = None
        self.metrics: MetricsFile | None = None
        """metrics.jsonl; None on all but the main process."""
        self.speed_at_peak: float | None = None
        """Tokens/s at the peak of the machine, if that is known."""
        self.tokens_per_second: float | None = None
        """The last one that was printed."""
        if self.shown and sys.stderr.isatty() and sys.stdout.isatty():
            self.bar = tqdm(
                total=max(self.max_steps, self.step),  # resumed after a larger train.max_steps
                initial=self.step,
                bar_format=BAR,
                dynamic_ncols=True,
            )

    def say(self, text: str = "") -> None:
        """Print a line, above the bar where there is one."""
        if not self.shown:
            return
        if self.bar is not None:
            self.bar.write(shown(text))
        else:
            print(shown(text), flush=True)

    def warn(self, text: str) -> None:
        """Print a warning, which is also one of the run's events."""
        self.say(f"warning: {text}")
        if self.metrics is not None:
            self.metrics.add_event("warning", self.step, text)

    def progress(
        self,
        step: int,
        loss: float,
        tokens_per_second: float,
        seconds_left: float,
        others: Sequence[str] = (),
    ) -> None:
        """Print the figures of a step; the width of a terminal may cut off the last of `others`."""
        self.tokens_per_second = tokens_per_second
        first, speed = f"loss {loss:.4f}", str(self.speed_in_words())
        if self.bar is not None:
            self.bar.set_postfix_str(shown(", ".join([first, speed, *others])), False)
            self.bar.update(step - self.bar.n)
        else:
            figures = ", ".join([first, *others, speed])
            self.say(f"step {step}/{self.max_steps}, {figures}, {duration(seconds_left)} left")

    def speed_in_words(self) -> str | None:
        """The last speed, with its share of the machine's peak if that is known."""
        if self.tokens_per_second is None:
            return None
        speed, peak = self.tokens_per_second, self.speed_at_peak
        return f"{_short(speed)} tokens/s" + (f", {speed / peak:.1%} MFU" if peak else "")

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _short(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """'0:12', '2:05:00'."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
