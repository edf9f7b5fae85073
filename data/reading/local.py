"""Local files that `data.source` names."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from data.errors import DataError
from data.progress import Progress
from data.reading.formats import TABLES, TEXT_SUFFIXES, suffixes

PIECE_BYTES = 1 << 20


def looks_like_files(source: str) -> bool:
    """Whether a source names local files, and not a data set on the Hub."""
    suffix, compression = suffixes(source)
    return (
        Path(source).expanduser().exists()
        or any(mark in source for mark in "*?[")
        or source.startswith(("/", "./", "../", "~"))
        or compression != ""
        or suffix in (*TEXT_SUFFIXES, *TABLES)
        or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) is None
    )


def matching_files(source: str) -> list[Path]:
    """The files that a path or a pattern matches, sorted by name.

    Raises DataError if there are none, OSError if a folder cannot be read or a name is too long,
    and RuntimeError for the home of an unknown user.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        raise DataError(
            f"data.source={source} is a directory. Name the files in it, for example "
            f"'data.source=\"{source.rstrip('/')}/*.txt\"'."
        )
    if path.exists():
        return [path]
    if not any(mark in source for mark in "*?["):
        streamed = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+@[\w./-]+", source):
            streamed = " For a revision of a data set of the Hub, set data.streaming=true."
        raise DataError(f"data.source={source}: there is no such file. Check the path.{streamed}")
    _check_folder_is_readable(path)
    files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    files = [file for file in files if not file.is_dir()]
    if not files:
        raise DataError(
            f"data.source={source} matches no file. Check the pattern; ** includes subfolders."
        )
    return files


def cannot_be_opened(source: str, error: OSError | RuntimeError) -> DataError:
    """The error for a path that cannot be looked up."""
    reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
    return DataError(f"data.source={source} cannot be opened: {reason}. Check the path.")


def _check_folder_is_readable(pattern: Path) -> None:
    """Raise OSError if the folder of a pattern is not readable: glob would find no files."""
    fixed = [part for part in pattern.parents if not glob.has_magic(str(part))]
    if fixed and fixed[0].is_dir():
        os.scandir(fixed[0]).close()


class NamedFile(NamedTuple):
    """A file of a source."""

    name: str
    """The name in its source, which decides its format."""
    path: Path


def named(paths: list[Path]) -> list[NamedFile]:
    """Files of this machine, named from the longest folder that all are in."""
    full = [path.absolute().as_posix() for path in paths]
    folder = common_folder(full)
    return [NamedFile(name[len(folder) :], path) for name, path in zip(full, paths, strict=True)]


def common_folder(paths: Iterable[str]) -> str:
    """The longest beginning of all paths that ends with a slash."""
    folders = [path.split("/")[:-1] for path in paths]
    if not folders:
        return ""
    shared = min(folders, key=len)
    while any(folder[: len(shared)] != shared for folder in folders):
        shared = shared[:-1]
    return "/".join([*shared, ""])


def stamps_of(name: str, files: list[Path]) -> list[tuple[int, int, int]]:
    """Size, modification time and inode of each file, which change when a process writes to it.

    Raises DataError if a file is not a regular file: a device or a pipe may never end.
    """
    stamps = []
    for file in files:
        with _translate_errors(name, file):
            found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DataError(
                f"data.source={name}: {file} is not a regular file, but a device or a pipe, for "
                "example. Write its text to a file first."
            )
        stamps.append((found.st_size, found.st_mtime_ns, found.st_ino))
    return stamps


def digest_of(name: str, file: Path, progress: Progress) -> bytes:
    """SHA-256 of a file; counts its bytes as progress. Raises DataError if it cannot be read."""
    digest = hashlib.sha256()
    with _translate_errors(name, file), open(file, "rb") as opened:
        while piece := opened.read(PIECE_BYTES):
            digest.update(piece)
            progress.done += len(piece)
    return digest.digest()


@contextmanager
def _translate_errors(name: str, file: Path) -> Iterator[None]:
    """Turn OSError into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"data.source={name}: cannot read {file}: {error.strerror}.") from error
