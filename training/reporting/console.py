"""What a run prints, on the main process; the others are silent."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

from training.reporting.events import Events
from training.reporting.output import shown
from training.reporting.samples import add_sample
from training.reporting.speed import Speed

BAR = "{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
BAR_COLUMNS = len("100%|#| step / [00:00<00:00], ")
"""What a line has besides the figures and two numbers of steps."""


@dataclass
class Console:
    """Lines on stdout; progress as a live bar where stderr is a terminal, and as lines in a log."""

    shown: bool
    """Whether this process prints."""
    max_steps: int
    step: int
    """The step that the run resumes from."""

    def __post_init__(self) -> None:
        self.bar: tqdm | None = None
        self.events: Events | None = None
        self.speed = Speed(None, None)
        self.tokens_per_second: float | None = None
        """The last one that was printed."""
        if self.shown and sys.stderr.isatty() and not _is_pipe(sys.stdout):
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
        self.note("warning", self.step, text)

    def note(self, event: str, step: int, text: str = "") -> None:
        """Add an event of the run, without a line."""
        if self.events is not None:
            self.events.add(event, step, text)

    def sample(self, step: int, text: str, shortened: str = "") -> None:
        """Print a text that the model has generated, set off from the rest, and keep it.

        `shortened` says how much there is of a text that time has ended.
        """
        heading = f"sample at step {step}" + f", {shortened}" * bool(shortened)
        self.say(f"----- {heading} -----\n{text.strip()}\n-----")
        if self.events is not None:
            add_sample(self.events.path.parent, step, text)

    def advance(self, step: int) -> None:
        """A step is done; its metrics are not known yet."""
        self.step = step
        if self.bar is not None:
            self.bar.update(step - self.bar.n)

    def progress(
        self,
        step: int,
        loss: float,
        tokens_per_second: float,
        seconds_left: float,
        rate: float,
        norm: float,
        skipped: int = 0,
        hub_status: str = "",
    ) -> None:
        """Print the metrics of a step: its learning rate and gradient norm, how many updates of the
        run were `skipped`, and the Hub's lag.
        """
        self.tokens_per_second = tokens_per_second
        first, speed = f"loss {loss:.4f}", f"{self.speed_in_words()}"
        others = [f"norm {norm:.2f}", f"rate {rate:.2g}"]
        faults = [f"{skipped} skipped"] * bool(skipped) + [hub_status] * bool(hub_status)
        figures = ", ".join([first, *others, speed, *faults])
        if self.bar is not None:
            self.bar.set_postfix_str(shown(self._fit([first, speed, *faults], others)), False)
            self.bar.update(step - self.bar.n)
        if self.bar is None or not sys.stdout.isatty():
            self.say(f"step {step}/{self.max_steps}, {figures}, {_duration(seconds_left)} left")

    def _fit(self, figures: list[str], others: list[str]) -> str:
        """The figures, and as many of the others as a line of the terminal takes."""
        room = shutil.get_terminal_size().columns - BAR_COLUMNS - 2 * len(str(self.max_steps))
        while others and len(", ".join([*figures, *others])) > room:
            others = others[:-1]
        return ", ".join([*figures, *others])

    def speed_in_words(self) -> str | None:
        """The last speed, with its share of the machine's peak where that is known."""
        if self.tokens_per_second is None:
            return None
        share = self.speed.share(self.tokens_per_second)
        mfu = "" if share is None else f", {share:.1%} MFU"
        return f"{_short(self.tokens_per_second)} tokens/s{mfu}"

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _is_pipe(stream: TextIO) -> bool:
    """Whether a reader may print it on the same terminal, as `| tee log` does."""
    return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)


def counted(number: int, noun: str) -> str:
    """'1 process', '2 processes', '2 threads'."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def _short(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
