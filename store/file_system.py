"""A folder of any file system that fsspec can open, as a store of files: S3, a shared disk, ...

Whatever the store has for it keeps files of others: an object store creates an object only where
there is none, and on a disk a file gets its name when all of it is written.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from huggingface_hub.utils._xet import abort_xet_session
from tqdm import tqdm

from common.failures import short_text
from common.hub_client import SLOWEST_BYTES_PER_SECOND, hub_api, open_xet_session
from common.printable import redact_urls
from snapshot.errors import SnapshotError
from store.disk import files_below, give_name, make_folders
from store.errors import (
    NoFile,
    StoreError,
    StoreMissing,
    StoreRefused,
    StoreUnreachable,
    Unsupported,
    translate,
)
from store.files import PARTIAL, Files
from store.latest import FOLDER, SNAPSHOTS
from store.store import BRANCH, PREFIX, RemoteFile, Transfer

Answer = TypeVar("Answer")
BUCKETS = f"{PREFIX}buckets/"
"""How the URL of a bucket of the Hub begins."""
BLOCK_BYTES = 8 << 20
"""What one request of a long transfer carries."""
READ_AHEAD_BYTES = 64 << 10
"""Of a bucket of the Hub, whose file system reads so much more than it is asked for."""
MOST_BLOCKS = 9_000
"""S3 takes 10,000 parts of a file."""
NO_CREDENTIALS = re.compile("Credential|ClientAuthentication|ProfileNotFound|TokenRetrieval")
"""In the names of errors of the libraries for S3, GCS and Azure."""
PRECONDITION = re.compile("PreconditionFailed|pre-?conditions|HTTP Status code: 412", re.IGNORECASE)
"""In errors of object stores that have the object."""


class HubExists(StoreRefused):
    """A file is there that this run did not write."""


class FileSystem(Files):
    """One folder. Every method raises StoreError; OSError is of this machine's own disk."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        """`timeout`: seconds that a request waits for data. Raises SnapshotError for a bad URL."""
        super().__init__(timeout)
        self._url = url.rstrip("/")
        protocol = url.partition("://")[0]
        self._hub = hub_api(timeout) if self._url.startswith(BUCKETS) else None
        """The Hub client, for a bucket of the Hub."""
        self._fs = _file_system(protocol, self.name)
        self._root = str(self._fs._strip_protocol(self._url)).rstrip("/")
        self._is_local = protocol in ("file", "local")
        self._has_create = self._hub is None
        """Whether the store can create a file only where there is none."""

    @property
    def name(self) -> str:
        """What messages call it, without what may be secret."""
        return redact_urls(self._url)

    @property
    def title(self) -> str:
        """What a sentence says of it."""
        return self.name

    @property
    def url(self) -> str:
        """What names it in `snapshot.resume`."""
        return self._url

    @property
    def key(self) -> str:
        """The configuration key and value that name it."""
        return f"hub.url={self.name}"

    def beside(self, suffix: str) -> str:
        """The URL of a folder next to it, or in it where it is a whole bucket."""
        is_bucket = not self._is_local and "/" not in self._root
        return f"{self._url}/{suffix.lstrip('-')}" if is_bucket else f"{self._url}{suffix}"

    def remove(self) -> None:
        """Remove the folder or the bucket of the Hub, if it exists."""
        if self._hub is not None and self._bucket_id() == self._root.removeprefix("buckets/"):
            self._ask(partial(self._hub.delete_bucket, self._bucket_id(), missing_ok=True))
            return
        with suppress(NoFile):
            self._ask(partial(self._fs.rm, self._root, recursive=True))

    def create(self, private: bool) -> None:
        """Create a folder on a disk, or a bucket of the Hub. One of S3 is the user's to create."""
        if self._hub is not None:
            create = partial(self._hub.create_bucket, private=private, exist_ok=True)
            self._ask(partial(create, self._bucket_id()))
        if self._is_local:
            if not Path(self._root).parent.is_dir():
                raise StoreRefused(
                    f"{self.key} cannot be created: there is no folder {Path(self._root).parent}. "
                    "Mount that disk, or check the path."
                )
            self._ask(lambda: self._fs.makedirs(self._root, exist_ok=True))

    def head(self, revision: str = BRANCH) -> tuple[str, bool]:
        """An empty text, because there are no commits, and whether a bucket of the Hub is private.

        Who can see another store, only its owner knows.
        """
        if self._hub is not None:
            info = self._ask(partial(self._hub.bucket_info, self._bucket_id()))
            return "", bool(info.private)
        if self._is_local:
            try:
                is_folder = stat.S_ISDIR(self._ask(partial(os.stat, self._root)).st_mode)
            except NoFile:
                is_folder = False
            if not is_folder:
                raise self._no_folder()
        return "", True

    def files(self, commit: str = "") -> dict[str, RemoteFile]:
        """The present files by path."""
        if self._is_local:
            try:
                sizes = self._ask(partial(files_below, Path(self._root)))
            except NoFile as error:
                raise self._no_folder() from error
            return {path: RemoteFile(size) for path, size in sorted(sizes.items())}
        self._fs.invalidate_cache()
        try:
            found = self._ask(partial(self._fs.find, self._root, detail=True))
        except NoFile as error:
            raise StoreMissing(f"{self.name} does not exist. Create that bucket.") from error
        inside = f"{self._root}/"
        return {
            path.removeprefix(inside): RemoteFile(int(entry["size"] or 0))
            for path, entry in sorted(found.items())
            if entry["type"] == "file" and path.startswith(inside) and not path.endswith("/")
        }

    def read(self, commit: str, path: str, most: int) -> bytes:
        """A small file, of which at most `most` bytes are read."""
        return bytes(self._ask(partial(self._fs.cat_file, self._at(path), start=0, end=most)))

    def download_all(
        self, commit: str, files: Mapping[str, RemoteFile], folder: Path | None, again: bool = False
    ) -> None:
        """Download files to `folder`, block by block. Raises OSError, too."""
        assert folder is not None, "only a repo has a cache"
        missing = {
            path: file for path, file in files.items() if again or not (folder / path).exists()
        }
        size = sum(file.size for file in missing.values())
        large = size > BLOCK_BYTES
        with tqdm(
            total=size, unit="B", unit_scale=True, desc="fetching", disable=None if large else True
        ) as bar:
            for path, file in missing.items():
                partial_file = folder / f"{path}.incomplete"
                partial_file.parent.mkdir(parents=True, exist_ok=True)
                with open(partial_file, "wb") as opened:
                    for start in range(0, file.size, BLOCK_BYTES):
                        end = min(start + BLOCK_BYTES, file.size)
                        block = self._ask(
                            partial(self._fs.cat_file, self._at(path), start=start, end=end)
                        )
                        opened.write(block)
                        bar.update(len(block))
                partial_file.replace(folder / path)

    def send(
        self, files: Mapping[str, Path], replaced: Collection[str] = ()
    ) -> tuple[dict[str, RemoteFile], Transfer]:
        """Upload files to their paths, one after the other; the digests are of what was sent."""
        if self._hub is not None:
            open_xet_session()
        sent, started = {}, time.monotonic()
        for path, source in files.items():
            with open(source, "rb") as opened:
                sent[path] = self._write(path, opened, path in replaced)
        size = sum(file.size for file in sent.values())
        return sent, Transfer(size, time.monotonic() - started)

    def put(self, files: Mapping[str, bytes]) -> None:
        """Write small files, which may exist. This machine's disk is not needed."""
        for path, content in files.items():
            self._write(path, BytesIO(content), replaces=True)

    def delete(self, paths: Collection[str]) -> None:
        """Delete files, and on a disk the folders that are empty then."""
        for path in paths:
            with suppress(NoFile):
                self._ask(partial(self._fs.rm_file, self._at(path)))
        if self._is_local:
            for folder in {Path(self._at(path)).parent for path in paths}:
                with suppress(OSError):
                    folder.rmdir()

    def _bucket_id(self) -> str:
        return "/".join(self._root.split("/")[1:3])

    def _no_folder(self) -> StoreMissing:
        return StoreMissing(
            f"there is no folder {self._root}. Mount that disk, or check {self.key}.", "no folder"
        )

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _write(self, path: str, source: BinaryIO, replaces: bool) -> RemoteFile:
        """Copy a file of this machine there. Raises HubExists unless it may replace one."""
        if self._is_local:
            return self._write_to_disk(path, source, replaces)
        if not replaces and not self._has_create:
            if self._ask(partial(self._fs.exists, self._at(path))):
                raise HubExists(f"{self.name} has a file that this run did not write ({path})")
            replaces = True
        try:
            return self._write_to_store(self._at(path), source, replaces)
        except NoFile:  # of a store that has folders
            self._make_folders(path)
            return self._write_to_store(self._at(path), source, replaces)
        except Unsupported:
            if replaces:
                raise
            self._has_create = False
            return self._write(path, source, replaces)

    def _make_folders(self, path: str) -> None:
        names = path.split("/")[:-1]
        for count in range(len(names)):
            folder = self._at("/".join(names[: count + 1]))
            with suppress(HubExists):  # never with parents: of S3 that is a bucket
                self._ask(partial(self._fs.mkdir, folder, create_parents=False))

    def _write_to_store(self, path: str, source: BinaryIO, replaces: bool) -> RemoteFile:
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        block_bytes = max(BLOCK_BYTES, -(-size // MOST_BLOCKS))
        if size <= block_bytes:
            content, mode = source.read(), "overwrite" if replaces else "create"
            self._ask(partial(self._fs.pipe_file, path, content, mode=mode), size)
            return RemoteFile(size, hashlib.sha256(content).hexdigest())
        digest = hashlib.sha256()
        mode = "wb" if replaces else "xb"
        opened = self._ask(partial(self._fs.open, path, mode, block_size=block_bytes))
        try:
            while block := source.read(block_bytes):
                digest.update(block)
                self._ask(partial(opened.write, block), len(block))
            self._ask(opened.close, size)  # a bucket of the Hub uploads all of it here
        except BaseException:
            with suppress(Exception):
                self._ask(opened.discard)
            opened.closed = True  # or its end would make a file of what was sent so far
            raise
        return RemoteFile(size, digest.hexdigest())

    def _write_to_disk(self, path: str, source: BinaryIO, replaces: bool) -> RemoteFile:
        """A file appears under its name when all of it is on the disk."""
        self.head()  # an unmounted disk is an error, and never a new folder
        target, digest, size = Path(self._at(path)), hashlib.sha256(), 0
        match = FOLDER.fullmatch(path)
        if match is not None:  # an attempt's own; the next file has the same name meanwhile
            part = Path(self._at(f"{SNAPSHOTS}/{PARTIAL}{match[3]}"))
        else:  # several attempts may write it at once
            part = Path(self._at(f"{PARTIAL}{uuid.uuid4().hex[:8]}"))
        self._ask(partial(make_folders, Path(self._root), target.parent))
        self._ask(partial(part.unlink, missing_ok=True))
        try:
            opened = cast(BinaryIO, self._ask(partial(open, part, "xb")))
            try:
                while block := source.read(BLOCK_BYTES):
                    digest.update(block)
                    size += self._ask(partial(opened.write, block))
                self._ask(opened.flush)
                self._ask(partial(os.fsync, opened.fileno()))
            finally:
                self._ask(opened.close)
            self._ask(partial(give_name, part, target, replaces))
        except BaseException:
            if match is None:
                with suppress(StoreError):
                    self._ask(partial(part.unlink, missing_ok=True))
            raise
        return RemoteFile(size, digest.hexdigest())

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
            if isinstance(error, TimeoutError) and self._hub is not None:
                abort_xet_session()  # an upload through Xet has no limit of its own
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> StoreError:
        """The error of the right kind. Each file system has types of its own."""
        reason = short_text(error) or type(error).__name__
        number = error.errno if isinstance(error, OSError) else None
        if isinstance(error, FileExistsError) or PRECONDITION.search(reason):
            return HubExists(f"{self.name} has a file that this run did not write ({reason})")
        if isinstance(error, FileNotFoundError):
            return NoFile(f"{self.name} lacks a file ({reason}): its snapshot was pruned", "lost")
        if self._hub is not None and not isinstance(error, TimeoutError):
            return translate(error, self.name, BRANCH, NoFile)
        if isinstance(error, TimeoutError):
            return StoreUnreachable(f"{self.name} did not answer in time", "no answer in time")
        if NO_CREDENTIALS.search(type(error).__name__):
            return StoreRefused(
                f"{self.key} needs credentials ({reason}). Set them as its command line tools read "
                "them, in the environment or in their files.",
                "no credentials",
            )
        if isinstance(error, PermissionError) or number == errno.EROFS:
            return StoreRefused(
                f"{self.name} refuses ({reason}). Check the credentials and their permissions.",
                "no access",
            )
        if number in (errno.ENOSPC, errno.EDQUOT):
            return StoreRefused(f"{self.name} has no room left ({reason}). Free some.", "no room")
        if number == errno.ENOSYS or isinstance(error, NotImplementedError):
            return Unsupported(f"{self.name} cannot do that ({reason}).", "not supported")
        if isinstance(error, ImportError | TypeError | ValueError):
            return StoreRefused(f"{self.name} cannot be used ({type(error).__name__}: {reason}).")
        return StoreUnreachable(f"{self.name} cannot be reached ({reason})", type(error).__name__)


def _file_system(protocol: str, name: str) -> Any:
    """A file system that reads listings always anew: another attempt may have changed them."""
    import fsspec  # only for such a store
    from fsspec.registry import known_implementations

    options = {"block_size": READ_AHEAD_BYTES} if protocol == "hf" else {}
    try:
        return fsspec.filesystem(
            protocol, use_listings_cache=False, skip_instance_cache=True, **options
        )
    except ValueError as error:
        raise SnapshotError(f"{name} cannot be opened: fsspec has no {protocol}://.") from error
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        raise SnapshotError(f"{name} needs a package: pip install {package}") from error
