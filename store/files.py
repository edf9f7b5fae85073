"""Stores of plain files, without commits: any file system of fsspec, a disk, a bucket of the Hub.

snapshots/step-00001000-3f2a1b2c/...    a snapshot, with its attempt's id; whole when it has its
                                        manifest.json
latest.json                             the newest one, its run, attempt and generation
metrics.jsonl                           the run's records (store/records.py)

Such a store cannot change several files at once, so the order is what makes an upload safe:
contents, manifest.json, latest.json, then deletions.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from huggingface_hub import constants
from huggingface_hub.utils._xet import abort_xet_session
from tqdm import tqdm

from common.failures import NO_CREDENTIALS, failure_of
from common.hub_client import SLOWEST_BYTES_PER_SECOND, hub_api, open_xet_session
from common.printable import redact_urls
from snapshot.disk.folder import SYSTEM_FILES
from snapshot.errors import SnapshotError
from store.errors import (
    NoFile,
    StoreError,
    StoreMissing,
    StoreMoved,
    StoreRefused,
    StoreUnreachable,
    Unsupported,
    translate,
)
from store.latest import FOLDER, LATEST, SNAPSHOTS
from store.store import (
    BRANCH,
    LARGEST_LATEST_BYTES,
    PREFIX,
    Addition,
    Head,
    RemoteFile,
    Store,
    Transfer,
)

Answer = TypeVar("Answer")
RECORDS = re.compile(r"metrics\.jsonl|proof\.json")
PART = ".partial-"
"""How a file of a disk begins until all of it is there."""
BLOCK_BYTES = 8 << 20
"""What one request of a long transfer carries."""
BUCKETS = f"{PREFIX}buckets/"
"""How the URL of a bucket of the Hub begins."""
READ_AHEAD_BYTES = 64 << 10
"""The Hub's file system reads so much more than it is asked for."""


class Files(Store):
    """A folder of any file system that fsspec can open: S3, GCS, Azure, ...

    Every method raises StoreError; OSError is of this machine's own disk.
    """

    def __init__(self, url: str, timeout: float = 60.0, **options: Any) -> None:
        """`timeout`: seconds that a request waits for data; `options` are fsspec's.

        Raises SnapshotError for a URL that fsspec cannot open.
        """
        super().__init__(timeout)
        self.url = url.rstrip("/")
        self.name = redact_urls(self.url)
        self.key = f"hub.url={self.name}"
        self._fs = _file_system(url.partition("://")[0], self.name, options)
        self._root = str(self._fs._strip_protocol(self.url)).rstrip("/")

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def beside(self, suffix: str) -> str:
        """The URL of a folder next to it, or in it where it is a whole bucket."""
        is_bucket = "/" not in self._root
        return f"{self.url}/{suffix.lstrip('-')}" if is_bucket else super().beside(suffix)

    def create(self, private: bool) -> None:
        """Nothing: a folder comes with its first file, and a bucket is the user's to create."""

    def remove(self) -> None:
        """Remove the folder, if it exists."""
        with suppress(NoFile):
            self._ask(partial(self._fs.rm, self._root, recursive=True))

    def is_private(self) -> bool:
        """Whether only the run's user can see it; True where only its owner knows."""
        return True

    def head(self, revision: str = BRANCH, known: Head | None = None) -> Head:
        """The present files. The token is the hash of `latest.json`."""
        private = self.is_private()
        files = {path: RemoteFile(size) for path, size in sorted(self.list_files().items())}
        return Head(self._token(files), private, files)

    def _token(self, files: Mapping[str, RemoteFile]) -> str:
        if LATEST not in files:
            return ""
        return sha256(self.read_bytes(LATEST, 0, LARGEST_LATEST_BYTES)).hexdigest()

    def read(self, head: Head, path: str, most: int) -> bytes:
        """A small file, of which at most `most` bytes are read."""
        return self.read_bytes(path, 0, most)

    def fetch(
        self, head: Head, paths: Collection[str], folder: Path | None, again: bool = False
    ) -> Path:
        """Download files to `folder`, or to a cache, block by block. Raises OSError, too."""
        if folder is None:
            digest = sha256(self.url.encode()).hexdigest()[:16]
            folder = Path(constants.HF_HOME) / "stores" / digest
        missing = [path for path in paths if again or not (folder / path).exists()]
        size = sum(head.files[path].size for path in missing)
        hidden = None if size > BLOCK_BYTES else True  # None: hidden where no terminal is
        with tqdm(total=size, unit="B", unit_scale=True, desc="fetching", disable=hidden) as bar:
            for path in missing:
                partial_file = folder / f"{path}.incomplete"
                partial_file.parent.mkdir(parents=True, exist_ok=True)
                with open(partial_file, "wb") as opened:
                    for start in range(0, head.files[path].size, BLOCK_BYTES):
                        end = min(start + BLOCK_BYTES, head.files[path].size)
                        opened.write(self.read_bytes(path, start, end))
                        bar.update(end - start)
                partial_file.replace(folder / path)
        return folder

    def publish(
        self, head: Head, add: Mapping[str, Addition], delete: Collection[str], message: str
    ) -> tuple[Head, Transfer]:
        """Contents, then small files in their order, then deletions."""
        started = time.monotonic()
        contents = {path: one for path, one in add.items() if isinstance(one.source, Path)}
        sent = {path: self._send(path, one) for path, one in contents.items()}
        size = sum(file.size for file in sent.values())
        transfer = Transfer(size, time.monotonic() - started)
        self._refuse_moved(head, sent)
        for path, addition in add.items():
            if path not in contents:
                sent[path] = self._send(path, addition)
        files = {**head.files, **sent}
        for path in self._delete_all(delete):
            files.pop(path, None)
        return Head(sent[LATEST].sha256 or "", head.private, files), transfer

    def _send(self, path: str, addition: Addition) -> RemoteFile:
        if isinstance(addition.source, bytes):
            return RemoteFile(len(addition.source), self.write(path, BytesIO(addition.source)))
        with open(addition.source, "rb") as opened:
            digest = self.write(path, opened)
            size = opened.tell()
        if addition.sha256 not in (digest, None):
            raise SnapshotError(f"{addition.source} is damaged: its content has changed")
        return RemoteFile(size, digest)

    def _refuse_moved(self, head: Head, sent: Mapping[str, RemoteFile]) -> None:
        """Raise StoreMoved if another attempt has published since `head` was read.

        Raises StoreUnreachable unless the store lists all files as they were sent.
        """
        now = self.head()
        if now.token != head.token:
            raise StoreMoved(f"{self.name} has moved on meanwhile", "moved on")
        for path, file in sent.items():
            if path not in now.files or now.files[path].size != file.size:
                raise StoreUnreachable(
                    f"{self.name} has applied an upload in part: {path} is missing", "in part"
                )

    def _delete_all(self, paths: Collection[str]) -> list[str]:
        """Delete files in their order; returns those that are gone.

        Where a store keeps one, as one under a retention rule, the rest of its folder stays: of a
        snapshot the manifest goes first, so that no half of it counts.
        """
        gone, stays = [], set()
        for path in paths:
            folder = path.rpartition("/")[0]
            try:
                if folder not in stays:
                    self.delete(path)
                    gone.append(path)
            except NoFile:
                gone.append(path)
            except StoreUnreachable:
                break  # the next upload tries again
            except StoreError as error:
                stays.add(folder)
                self.note(
                    f"old snapshots still use storage of {self.name}: {error.reason}. Uploads "
                    "continue."
                )
        return gone

    def foreign_file(self, paths: Iterable[str]) -> str | None:
        """A file that no run uploaded, and no file manager created.

        Records count as a run's only beside its snapshots or latest.json.
        """
        known = {path for path in paths if FOLDER.fullmatch(path) or path == LATEST}
        for path in sorted(set(paths) - known):
            is_known = path.startswith(PART) or (known and RECORDS.fullmatch(path))
            if not (is_known or SYSTEM_FILES.fullmatch(path.rpartition("/")[2])):
                return path
        return None

    # Requests to the file system.

    def list_files(self) -> dict[str, int]:
        """The sizes of all files by path."""
        self._fs.invalidate_cache()
        try:
            entries = self._ask(partial(self._fs.find, self._root, detail=True))
        except NoFile as error:
            raise StoreMissing(f"{self.name} does not exist. Create that bucket.") from error
        inside = f"{self._root}/"
        return {
            path.removeprefix(inside): int(entry["size"] or 0)
            for path, entry in entries.items()
            if entry["type"] == "file" and path.startswith(inside) and not path.endswith("/")
        }

    def read_bytes(self, path: str, start: int, end: int) -> bytes:
        """Some bytes of a file. Raises NoFile if it does not exist."""
        return bytes(self._ask(partial(self._fs.cat_file, self._at(path), start=start, end=end)))

    def write(self, path: str, source: BinaryIO) -> str:
        """Write a file, which may exist, in blocks; returns its SHA-256.

        Readers see nothing of it before all of it is there.
        """
        try:
            return self._write(self._at(path), source)
        except NoFile:  # of a store that has folders
            folder = self._at(path).rpartition("/")[0]
            self._ask(partial(self._fs.makedirs, folder, exist_ok=True))
            return self._write(self._at(path), source)

    def _write(self, path: str, source: BinaryIO) -> str:
        source.seek(0)
        digest = sha256()
        opened = self._ask(partial(self._fs.open, path, "wb", block_size=BLOCK_BYTES))
        try:
            while block := source.read(BLOCK_BYTES):
                digest.update(block)
                self._ask(partial(opened.write, block), len(block))
            self._ask(opened.close, source.tell())  # a bucket of the Hub uploads all of it here
        except BaseException:
            with suppress(Exception):
                self._ask(opened.discard)
            opened.closed = True  # or its end would make a file of what was sent so far
            raise
        return digest.hexdigest()

    def delete(self, path: str) -> None:
        """Delete a file. Raises NoFile if it does not exist."""
        self._ask(partial(self._fs.rm_file, self._at(path)))

    def _ask(self, request: Callable[[], Answer], carried: int = 0) -> Answer:
        """The answer to a request, which is given up after some time: few file systems do so.

        `carried`: how many bytes it carries, which take some time more.
        """
        answer: Future[Answer] = Future()

        def run() -> None:
            try:
                answer.set_result(request())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="store request", daemon=True).start()
        try:
            return answer.result(self.timeout + carried / SLOWEST_BYTES_PER_SECOND)
        except Exception as error:
            raise self.translated(error) from error

    def translated(self, error: Exception) -> StoreError:
        """The error of the right kind. Each file system has types of its own."""
        failure, number = failure_of(error), getattr(error, "errno", None)
        if isinstance(error, FileNotFoundError):
            return NoFile(f"{self.name} lacks a file ({failure}): its snapshot was pruned", "lost")
        if failure.may_pass:
            return StoreUnreachable(
                f"{self.name} cannot be reached ({failure})",
                failure.short,
                timed_out=failure.timed_out,
            )
        kind, sentence = StoreRefused, f"{self.name} cannot be used ({failure.short}: {failure})."
        if NO_CREDENTIALS.search(failure.short):
            sentence = (
                f"{self.key} needs credentials ({failure}). Set them as its command line tools "
                "read them, in the environment or in their files."
            )
        elif isinstance(error, PermissionError) or number == errno.EROFS:
            sentence = f"{self.name} refuses ({failure}). Check the credentials and their "
            sentence += "permissions."
        elif number in (errno.ENOSPC, errno.EDQUOT):
            sentence = f"{self.name} has no room left ({failure}). Free some."
        elif number == errno.ENOSYS or isinstance(error, NotImplementedError):
            kind, sentence = Unsupported, f"{self.name} cannot do that ({failure})."
        return kind(sentence, failure.short)


class Disk(Files):
    """A folder of a disk, which may be shared by machines, and may not be mounted.

    It is never created by an upload, and a folder that cannot be listed is an error: "nothing is
    there" would begin the run again.
    """

    def _check(self, folder: str = "") -> None:
        """Raise StoreMissing if there is no such folder: the disk may not be mounted."""
        folder = folder or self._root
        with suppress(NoFile):
            if stat.S_ISDIR(self._ask(partial(os.stat, folder)).st_mode):
                return
        raise StoreMissing(
            f"there is no folder {folder}. Mount that disk, or check {self.key}.", "no folder"
        )

    def create(self, private: bool) -> None:
        """Create the folder, in one that must exist."""
        self._check(str(Path(self._root).parent))
        self._ask(partial(Path(self._root).mkdir, exist_ok=True))

    def list_files(self) -> dict[str, int]:
        """The sizes of all files by path."""
        self._check()
        return self._ask(partial(files_below, Path(self._root)))

    def write(self, path: str, source: BinaryIO) -> str:
        """Write a file, which appears under its name when all of it is on the disk."""
        self._check()
        target, part = Path(self._at(path)), Path(self._at(f"{PART}{uuid.uuid4().hex[:8]}"))
        size, digest = source.seek(0, os.SEEK_END), sha256()
        source.seek(0)

        def write() -> None:
            try:
                with open(part, "wb") as opened:
                    while block := source.read(BLOCK_BYTES):
                        digest.update(block)
                        opened.write(block)
                    opened.flush()
                    os.fsync(opened.fileno())
                target.parent.mkdir(parents=True, exist_ok=True)
                part.replace(target)
            except BaseException:
                part.unlink(missing_ok=True)
                raise

        self._ask(write, size)
        return digest.hexdigest()

    def delete(self, path: str) -> None:
        """Delete a file, and its folder if that is empty then."""
        super().delete(path)
        with suppress(OSError):
            Path(self._at(path)).parent.rmdir()


def files_below(root: Path) -> dict[str, int]:
    """The sizes of all files of a folder by path; links to folders are followed.

    Raises OSError, unless no snapshot can be there, for a folder that cannot be read and for a link
    to nothing, perhaps to a disk that is not mounted. What is deleted meanwhile is left out.
    """

    def may_hold_snapshots(path: Path) -> bool:
        return path == root or path.relative_to(root).parts[0] == SNAPSHOTS

    def refuse(error: OSError) -> None:
        path = Path(error.filename)
        is_systems = isinstance(error, PermissionError) and not may_hold_snapshots(path)
        is_gone = isinstance(error, FileNotFoundError) and path != root
        if not (is_systems or is_gone):  # lost+found of a whole disk
            raise error

    sizes = {}
    for folder, inside, names in os.walk(root, onerror=refuse, followlinks=True):
        paths = [Path(folder, name) for name in inside]
        inside[:] = [path.name for path in paths if not _leads_up(path)]
        for path in (Path(folder, name) for name in names):
            try:
                sizes[path.relative_to(root).as_posix()] = path.stat().st_size
            except FileNotFoundError:
                if path.is_symlink() and may_hold_snapshots(path):
                    raise OSError(errno.EIO, "a link to nothing", str(path)) from None
    return sizes


def _leads_up(path: Path) -> bool:
    """Whether a link leads to a folder that it is in: it holds nothing new, and has no end."""
    return path.is_symlink() and any(path.samefile(above) for above in path.parents)


class Bucket(Files):
    """A bucket of the Hub, or a folder in one. Every method raises StoreError."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        """`url`: `hf://buckets/owner/name`; `timeout`: seconds that a request waits for data."""
        self._api = hub_api(timeout)
        super().__init__(url, timeout, block_size=READ_AHEAD_BYTES)
        self._id = "/".join(self._root.split("/")[1:3])

    def is_private(self) -> bool:
        """Whether only its owner can see it."""
        return bool(self._ask(partial(self._api.bucket_info, self._id)).private)

    def create(self, private: bool) -> None:
        """Create the bucket, if it does not exist."""
        self._ask(partial(self._api.create_bucket, self._id, private=private, exist_ok=True))

    def remove(self) -> None:
        """Remove the bucket, or the folder in one."""
        if self._root != f"buckets/{self._id}":
            super().remove()
            return
        with suppress(NoFile):
            self._ask(partial(self._api.delete_bucket, self._id, missing_ok=True))

    def write(self, path: str, source: BinaryIO) -> str:
        """Write a file; returns its SHA-256."""
        open_xet_session()
        return super().write(path, source)

    def translated(self, error: Exception) -> StoreError:
        """The error of the right kind."""
        if isinstance(error, TimeoutError):
            abort_xet_session()  # an upload through Xet has no limit of its own
        elif not isinstance(error, FileNotFoundError):
            return translate(error, self.name, BRANCH, NoFile)
        return super().translated(error)


def _file_system(protocol: str, name: str, options: dict[str, Any]) -> Any:
    """A file system that reads listings always anew: another attempt may have changed them."""
    import fsspec  # only for such a store
    from fsspec.registry import known_implementations

    try:
        return fsspec.filesystem(
            protocol, use_listings_cache=False, skip_instance_cache=True, **options
        )
    except ValueError as error:
        raise SnapshotError(f"{name} cannot be opened: fsspec has no {protocol}://.") from error
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        raise SnapshotError(f"{name} needs a package: pip install {package}") from error
