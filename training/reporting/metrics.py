"""metrics.jsonl: one JSON object a line, every step once, over all restarts of a run.

The file grows with its run, so no start and no snapshot reads a long file completely. Steps only
rise in it, so a bisection finds a step in about thirty short reads.
"""

from __future__ import annotations

import json
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from config.schema import ConfigError

Record = dict[str, Any]
KINDS = ("train", "eval", "sample")
"""The kinds of lines, in the order in which a step adds them."""
MOST_PLACES = 100
"""For a picture of a long run, lines are read around so many steps."""
PLACE_BYTES = 3 << 10
"""Bytes read before each of these steps: about twenty lines, whose mean is smooth enough."""
COUNTED_AT_ONCE = 1 << 20
HOLE = b"\0"
"""After a power loss a file may hold this where its content had not reached the disk."""
LINE = re.compile(
    rb'\{"event": "(train|eval)", "step": (\d+), "loss": (\d[\d.e+-]*)[,}]'
    rb'(?:[^\n]*?"tokens_per_second": (\d[\d.e+-]*))?'
)
"""The beginning of a line as this file writes it; matching takes a fifth of the time of JSON."""


def read_metrics(path: Path, after: int = 0) -> list[Record]:
    """The lines of the steps after one, without a last line that was cut short.

    Raises ConfigError that names the line when the file holds something else.
    """
    if not path.exists():
        return []
    with open(path, "rb") as opened:
        begin = place_after(opened, after) if after else 0
        return list(_records(opened, begin, path.stat().st_size))


def sample_metrics(path: Path, eval_every: int) -> list[Record]:
    """Event, step, loss and speed of lines for a picture, at a bounded cost for any file.

    Returns all lines of a short file. From a long one it returns those just before evenly spaced
    multiples of `eval_every`, where the evaluations are. Raises as `read_metrics` does.
    """
    with open(path, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size <= MOST_PLACES * PLACE_BYTES:
            return _with_loss(_records(opened, 0, size, figures_at))
        last = _newest_step(opened, size)
        records: list[Record] = []
        before = place = 0
        for step in _places(last, eval_every):
            place = place_after(opened, step, place)
            around = _lines_before(opened, place)
            records += [record for record in around if before < record["step"]]
            before = step
        return records


def _with_loss(records: Iterable[Record]) -> list[Record]:
    """All but the samples."""
    return [record for record in records if record["event"] != "sample"]


def _newest_step(opened: BinaryIO, size: int) -> int:
    return max((one["step"] for one in _lines_before(opened, size)), default=0)


def _lines_before(opened: BinaryIO, end: int) -> list[Record]:
    """The lines with a loss in `PLACE_BYTES` before an offset.

    Where a sample fills these, in twice as many, and so on.
    """
    length = PLACE_BYTES
    while True:
        begin = _line_after(opened, max(0, end - length))[0]
        found = _with_loss(_records(opened, begin, end, figures_at))
        if found or length >= end:
            return found
        length *= 2


def _places(last: int, eval_every: int) -> list[int]:
    """Evenly spaced steps of a long run, most of them with an evaluation."""
    apart = max(1, last // MOST_PLACES)
    evaluated = eval_every
    while evaluated < apart:  # doubling: probably evaluated also where eval_every was another
        evaluated *= 2
    steps = {*range(evaluated, last, evaluated), last // eval_every * eval_every, last}
    if evaluated > 2 * apart:
        steps.update(range(apart, last, apart))
    return sorted(steps)


def place_after(opened: BinaryIO, step: int, begin: int = 0) -> int:
    """The offset in an opened metrics file where the lines up to `step` end.

    Half a line may follow, or the remains of lines that a power loss kept from the disk.
    The search starts at `begin`, the beginning of a line of an earlier step or the same one. Raises
    ConfigError for a line that is not a line of metrics.
    """

    def step_after(offset: int) -> int:
        at, line = _line_after(opened, offset)
        return step + 1 if _is_lost(line) else int(figures_at(opened, at, line)["step"])

    size = os.fstat(opened.fileno()).st_size
    offsets = range(begin, max(begin, size))
    at, line = _line_after(opened, begin + bisect_right(offsets, step, key=step_after))
    if _has_hole(line):  # the search has taken it for later; the lines behind it must be later, too
        _refuse_earlier(opened, at, step)
    return at


def _place_of(opened: BinaryIO, step: int) -> tuple[int, int]:
    """Where the lines of a step begin and end, up to the first that a power loss has damaged.

    The bisection may pass over a damaged line: the evaluation, which follows the step's snapshot.
    """
    begin = place_after(opened, step - 1)
    end = place_after(opened, step, begin)
    opened.seek(begin)
    lines = opened.read(end - begin)
    if HOLE in lines:
        end = begin + lines.rfind(b"\n", 0, lines.index(HOLE)) + 1
    return begin, end


def _is_lost(line: bytes) -> bool:
    """Whether a line is not whole: its end was not written, or not before a power loss."""
    return not line.endswith(b"\n") or _has_hole(line)


def _has_hole(line: bytes) -> bool:
    """Whether bytes of a line that this file wrote, which is ASCII, had not reached the disk."""
    return HOLE in line and line.isascii()


def _refuse_earlier(opened: BinaryIO, at: int, step: int) -> None:
    """Raise ConfigError for the line at an offset if lines up to `step` follow it."""
    opened.seek(at)
    hole, offset = opened.readline(), opened.tell()
    while line := opened.readline():
        found = {} if _is_lost(line) else figures_at(opened, offset, line)
        # Evaluation and sample of the step follow its snapshot, and are repeated.
        if found and (found["step"], found["event"] != "train") <= (step, False):
            _parsed(opened, at, hole)
        offset += len(line)


def held_out_at(path: Path, step: int) -> float | None:
    """The held-out loss of a step, or None where the file has none. Raises ConfigError."""
    if not path.exists():
        return None
    with open(path, "rb") as opened:
        records = _records(opened, *_place_of(opened, step))
        return next((float(r["loss"]) for r in records if r["event"] == "eval"), None)


def has_step(path: Path, step: int) -> bool:
    """Whether a metrics file has lines of a step. Raises ConfigError as `place_after` does."""
    if not path.exists():
        return False
    with open(path, "rb") as opened:
        begin, end = _place_of(opened, step)
        return end > begin


def as_line(record: Record) -> bytes:
    """A record as a line of the file."""
    return json.dumps(record, allow_nan=False).encode() + b"\n"


class MetricsFile:
    """Appends lines. If the disk refuses them, they wait for the next write."""

    def __init__(self, path: Path, step: int) -> None:
        """Continue a file after `step`; the run repeats the later lines.

        The file is truncated in place, so that after a kill at any moment it has the lines up to
        `step`. Raises OSError where it is not writable, ConfigError where it is no metrics file.
        """
        self.path = path
        self._lock = Lock()  # the loop and the thread that writes a snapshot both use the file
        self.waiting = bytearray()
        self.fault: str | None = None
        """Why the last write failed; None if it succeeded."""
        with open(path, "a+b") as opened:
            self.size = opened.truncate(_place_of(opened, step)[1])

    def append(self, records: Iterable[Record]) -> None:
        """Add lines. Those that the disk refuses wait."""
        with self._lock:
            self._append(b"".join(map(as_line, records)))

    def _append(self, lines: bytes) -> None:
        self.waiting += lines
        try:
            # "a" creates the file again where somebody removed it, and continues a truncated one.
            with open(self.path, "ab") as opened:
                if self.waiting and opened.tell() > self.size:
                    opened.truncate(self.size)  # half a line, where the last write failed
                self.size = min(self.size, opened.tell())
                opened.write(self.waiting)
        except OSError as error:
            self.fault = f"{self.path}: {error.strerror}"
            return
        self.size += len(self.waiting)
        self.waiting.clear()
        self.fault = None

    def flush(self) -> None:
        """Write all lines to the disk. Raises OSError when it refuses them."""
        with self._lock:
            self._append(b"")
            if self.waiting:
                raise OSError(self.fault)
        with open(self.path, "rb") as opened:
            os.fsync(opened.fileno())


def _line_after(opened: BinaryIO, offset: int) -> tuple[int, bytes]:
    """The first line that begins at an offset or later, and where it begins."""
    opened.seek(max(0, offset - 1))
    begin = offset and offset - 1 + len(opened.readline())
    return begin, opened.readline()


def _records(
    opened: BinaryIO,
    begin: int,
    end: int,
    parse: Callable[[BinaryIO, int, bytes], Record] | None = None,
) -> Iterator[Record]:
    """The complete lines between two offsets; the first is the beginning of a line."""
    opened.seek(begin)
    for line in opened.read(max(0, end - begin)).split(b"\n")[:-1]:
        yield (parse or _parsed)(opened, begin, line)
        begin += len(line) + 1


def figures_at(opened: BinaryIO, begin: int, line: bytes) -> Record:
    """Event, step and loss of a line, and the speed if it has one; of a sample, its text."""
    if (ours := LINE.match(line)) is not None:
        with suppress(ValueError):  # such as 1.2.3
            speed = {} if ours[4] is None else {"tokens_per_second": float(ours[4])}
            return {
                "event": ours[1].decode(),
                "step": int(ours[2]),
                "loss": float(ours[3]),
                **speed,
            }
    return _parsed(opened, begin, line)


def is_content(record: Record) -> bool:
    """Whether a record of untrusted JSON has what a line of its kind is about: loss or text."""
    if record.get("event") == "sample":
        return isinstance(record.get("text"), str)
    return record.get("event") in KINDS and is_finite(record.get("loss"))


def is_finite(value: Any) -> bool:
    """Whether a value of untrusted JSON is a number that a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _parsed(opened: BinaryIO, begin: int, line: bytes) -> Record:
    try:
        record = json.loads(line.decode())
        known = isinstance(record, dict) and type(record.get("step")) is int
        known = known and is_content(record)
        known = known and is_finite(record.get("tokens_per_second", 0))
    except (ValueError, RecursionError):
        known = False
    if known:
        return record
    opened.seek(0)
    blocks = (min(COUNTED_AT_ONCE, begin - at) for at in range(0, begin, COUNTED_AT_ONCE))
    number = 1 + sum(opened.read(size).count(b"\n") for size in blocks)
    raise ConfigError(
        f"line {number} of {opened.name} is not a line of metrics. Remove it, or move the file "
        "out of run.dir; the run itself does not need it."
    )
