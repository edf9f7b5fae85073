"""Disks that tests fill up, take away and limit; all are mounted, which needs root."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

Disk = TypeVar("Disk")


def call(*words: object) -> None:
    subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True)


class Tmpfs:
    """A small disk that fills up, or is remounted read-only, as after an error of the disk."""

    def __init__(self, folder: Path, megabytes: int = 4) -> None:
        self.folder = folder
        call("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder)

    def fill(self) -> str:
        """Leave no room; what the system says from then on."""
        with contextlib.suppress(OSError), open(self.folder / "ballast", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1000))
        return "No space left on device"

    def empty(self) -> None:
        """Make room."""
        (self.folder / "ballast").unlink()

    def make_read_only(self) -> str:
        """Take no more writes; what the system says from then on."""
        while True:  # refused as long as a file is open for writing
            with contextlib.suppress(subprocess.CalledProcessError):
                call("mount", "-o", "remount,ro", self.folder)
                return "Read-only file system"

    def make_writable(self) -> None:
        """Take writes again."""
        call("mount", "-o", "remount,rw", self.folder)


@contextlib.contextmanager
def mounted(folder: Path, make: Callable[[], Disk]) -> Iterator[Disk]:
    """`make()` mounts something at the folder. Skips where this machine does not let it."""
    folder.mkdir()
    try:
        disk = make()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot be mounted here: {getattr(error, 'stderr', '') or error}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Capabilities(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


@contextlib.contextmanager
def as_anybody() -> Iterator[None]:
    """This thread obeys the modes of files, as that of a user who is not root does (Linux)."""
    system = ctypes.CDLL(None, use_errno=True)
    header, held = _Header(0x20080522, 0), (_Capabilities * 2)()
    assert system.capget(ctypes.byref(header), held) == 0
    before = held[0].effective
    held[0].effective &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert system.capset(ctypes.byref(header), held) == 0
    try:
        yield
    finally:
        held[0].effective = before
        assert system.capset(ctypes.byref(header), held) == 0
