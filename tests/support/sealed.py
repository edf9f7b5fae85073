"""Snapshots that are damaged under a manifest that fits, and how they are refused."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# The files of a module that is imported later would count as opened.
import transformers.conversion_mapping
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

from snapshot.disk.checking import check_snapshot
from snapshot.disk.folder import MANIFEST
from snapshot.errors import SnapshotError

MOST_MEMORY = 200_000_000
PEAK_RESET = Path("/proc/self/clear_refs")
opened: list[str] | None = None
others: set[int | None] = set()
"""Threads that a test before has left, such as an uploader that waits."""


def _note_opened(event: str, arguments: tuple) -> None:
    if opened is None or threading.get_ident() in others:
        return
    if threading.current_thread().name == "request":  # one that was given up goes on
        return
    if event in ("open", "os.listdir", "os.scandir"):
        opened.append(str(arguments[0]))


sys.addaudithook(_note_opened)


@contextmanager
def only_inside(folder: Path) -> Iterator[None]:
    """Nothing outside the folder is opened, and not more memory is taken than is allowed."""
    global opened, others
    with at_most(MOST_MEMORY):
        others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        opened = []
        try:
            yield
            outside = [path for path in opened if not Path(path).is_relative_to(folder)]
        finally:
            opened = None
    assert not outside, f"opened outside the snapshot: {outside}"


@contextmanager
def at_most(limit: int) -> Iterator[None]:
    """No more memory than so many bytes is taken meanwhile, by Python or by a library.

    Where the system does not tell, by Python: to note each allocation takes twice the time.
    """
    try:
        PEAK_RESET.write_text("5")  # proc_pid_clear_refs(5): the peak begins anew
        before = memory_in("VmRSS")
    except OSError:
        tracemalloc.start()
        try:
            yield
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    else:
        yield
        peak = memory_in("VmHWM") - before
    assert peak < limit


def memory_in(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def seal(folder: Path) -> None:
    """Make the manifest fit whatever the files are now."""
    files = []
    for path in sorted(folder.iterdir()):
        if path.name != MANIFEST and path.is_file():
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            files.append({"path": path.name, "size": len(content), "sha256": digest})
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "files": files}))


def is_refused(folder: Path) -> str:
    """The sentence with which a snapshot is refused."""
    with only_inside(folder), pytest.raises(SnapshotError) as refused:
        check_snapshot(folder)
    return str(refused.value)
