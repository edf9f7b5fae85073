"""Xet, the Hub's storage for large files: transfers that yield to training and cannot hang.

This calls hf_xet, the client's library for it, directly. huggingface_hub runs it with its defaults:
a request may last 300 seconds, no matter how many bytes move, and the last one of an upload for
ever. Here a transfer ends when no byte moves for some time. Its threads are the library's own; they
take no signals, and on Linux they have a low priority.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from tqdm import tqdm

from data.printable import printable
from store.errors import (
    DISK_ERRORS,
    TRANSIENT_STATUSES,
    HubError,
    HubRefused,
    HubUnreachable,
    lost_file,
    redact_secrets,
    translate_errors,
)
from store.store import RemoteFile, Transfer
from store.waiting import transfer

SETTINGS = {
    # It counts from the start of a request, and a xorb of 64 MB may take long: we watch ourselves.
    "client.read_timeout": "24h",
    # Memory: each upload in flight holds a xorb.
    "client.ac_max_upload_concurrency": 3,
    "data.max_concurrent_file_ingestion": 2,
    "data.ingestion_block_size": "4mb",
    # So that a slow transfer is seen to progress.
    "client.upload_reporting_block_size": 64 << 10,
}
NICENESS = 10
"""Added to that of the process, for the threads that cut, hash and compress an upload."""
POLL_SECONDS = 0.5
NO_SUCH_ENDPOINT = (400, 404, 405, 410, 501)
"""Statuses of a server without Xet for a Xet token request; other statuses may be transient."""
RENEWED = 401
"""The status for an expired token; a new transfer has a new one."""
STATUS = re.compile(r"HTTP status \w+ error \((\d{3})")
DISK_ERROR = re.compile(r"\(os error (\d+)\)")


class NoXet(Exception):
    """The server has no Xet storage, or this machine no place for its cache: a sentence."""


def is_available() -> bool:
    """Whether this process may use Xet, and hf_xet is installed."""
    return not constants.HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None


class XetStorage:
    """The Xet storage of one model repo.

    Every method raises NoXet, HubError, and OSError for an error of the local disk.
    """

    def __init__(self, repo_id: str, timeout: float) -> None:
        """`timeout`: seconds after which a transfer ends if no byte moves."""
        self.repo_id, self.timeout = repo_id, timeout

    def upload(
        self, paths: Sequence[Path], revision: str = ""
    ) -> tuple[list[RemoteFile], Transfer]:
        """Upload files; returns each with its hashes, computed from what was sent."""
        import hf_xet

        started, connection = time.monotonic(), self._connection("write", revision)
        session = _in_low_priority(lambda: hf_xet.XetSession(_config()))
        with self._translated():
            group = session.new_upload_commit(**connection)
            handles = [group.start_upload_file(str(path), hf_xet.COMPUTE_SHA256) for path in paths]
            report = _finish(group, self.timeout)
            found = [handle.result().xet_info for handle in handles]
        files = [RemoteFile(one.file_size, one.sha256, one.hash) for one in found]
        sent = report.dedup_metrics.total_bytes_uploaded
        return files, Transfer(sent, time.monotonic() - started)

    def download(
        self,
        files: Mapping[Path, RemoteFile],
        revision: str = "",
        notify: Callable[[int], None] = lambda size: None,
    ) -> None:
        """Download files to their paths. `notify` receives the bytes so far, twice a second."""
        import hf_xet

        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
        connection = self._connection("read", revision)
        session = hf_xet.XetSession(_config())
        with self._translated(revision), transfer(self.timeout) as (timeout, progress):

            def moved(size: int) -> None:
                progress()
                notify(size)

            group = session.new_file_download_group(**connection)
            for path, file in files.items():
                info = hf_xet.XetFileInfo(file.xet_hash, file.size)
                group.start_download_file(info, str(path.absolute()))
            _finish(group, timeout, moved)

    def download_to(self, folder: Path, files: Mapping[str, RemoteFile], revision: str) -> set[str]:
        """Download those files that are in Xet storage below a folder; returns their paths."""
        found = {path for path, file in files.items() if file.xet_hash is not None}
        partial = {  # an earlier download, which was cut off, may have left the others
            folder / f"{path}.incomplete": files[path]
            for path in sorted(found)
            if not (folder / path).exists()
        }
        if partial:
            size = sum(file.size for file in partial.values())
            with tqdm(total=size, unit="B", unit_scale=True, desc="fetching", disable=None) as bar:
                self.download(partial, revision, lambda done: bar.update(done - bar.n))
        for path in partial:
            path.rename(path.with_suffix(""))
        return found

    def _connection(self, scope: str, revision: str) -> dict[str, Any]:
        """Where the storage is, and a token for it that hf_xet renews before it expires."""
        _check_cache()
        url = f"{constants.ENDPOINT}/api/models/{self.repo_id}/xet-{scope}-token"
        if revision:
            url += f"/{revision}"
        headers = build_hf_headers()
        with translate_errors(self.repo_id, revision):
            response = get_session().get(url, headers=headers)
        is_unknown = "X-Error-Code" not in response.headers  # the endpoint, not the repo
        if response.status_code in NO_SUCH_ENDPOINT and is_unknown:
            raise NoXet(
                f"{redact_secrets(constants.ENDPOINT)} has no Xet storage for large files (HTTP "
                f"{response.status_code}); they are transferred without it."
            )
        with translate_errors(self.repo_id, revision):
            hf_raise_for_status(response)
            place = response.headers[constants.HUGGINGFACE_HEADER_X_XET_ENDPOINT]
            if not place.startswith(("https://", "http://")):  # hf_xet also takes a folder's path
                what = f"the server names {place:.80} as the Xet storage of {self.repo_id}"
                raise HubRefused(f"{what}, which is not a URL.")
            expires = int(response.headers[constants.HUGGINGFACE_HEADER_X_XET_EXPIRATION])
            return {
                "endpoint": place,
                "token": response.headers[constants.HUGGINGFACE_HEADER_X_XET_ACCESS_TOKEN],
                "token_expiry_unix_secs": expires,
                "token_refresh_url": url,
                "token_refresh_headers": headers,
            }

    @contextmanager
    def _translated(self, downloading: str | None = None) -> Iterator[None]:
        """Turn the errors of hf_xet, which are few built-in types, into a HubError.

        `downloading` is the revision that files are downloaded from.
        """
        try:
            yield
        except HubError:
            raise
        except Exception as error:
            reason = printable(redact_secrets(str(error)).strip()[:200])
            on_disk = DISK_ERROR.search(str(error))
            if on_disk and int(on_disk[1]) in DISK_ERRORS:
                raise OSError(int(on_disk[1]), os.strerror(int(on_disk[1]))) from error
            found = STATUS.search(reason)
            status = int(found[1]) if found else 0
            if status == 404 and downloading is not None:
                raise lost_file(self.repo_id, downloading, "HTTP 404") from error
            if 400 <= status < 500 and status not in (RENEWED, *TRANSIENT_STATUSES):
                raise HubRefused(
                    f"the Hub's storage refuses (HTTP {status}). Check the token's permissions on "
                    f"{self.repo_id}, and the free storage.",
                    f"HTTP {status}",
                ) from error
            if status:
                short = f"HTTP {status}"
                raise HubUnreachable(f"the Hub's storage answers {short}", short) from error
            raise HubUnreachable(f"the Hub's storage cannot be reached ({reason})") from error


def _finish(group: Any, timeout: float, notify: Callable[[int], None] = lambda size: None) -> Any:
    """Wait for a transfer, and end it if no byte moves for `timeout` seconds; its report."""
    ended, stalled = threading.Event(), threading.Event()

    def watch() -> None:
        last, since = None, time.monotonic()
        while not ended.wait(POLL_SECONDS):
            report = group.progress()
            now = _moved(report)
            if now != last:
                last, since = now, time.monotonic()
                notify(report.total_bytes_completed)
            elif time.monotonic() - since > timeout:
                stalled.set()
                group.abort()
                return

    watcher = threading.Thread(target=watch, name="xet watcher", daemon=True)
    watcher.start()
    try:
        return group.wait_to_finish()
    except Exception as error:
        if stalled.is_set():
            why = f"no byte has moved to or from the Hub for {timeout:.0f} seconds"
            raise HubUnreachable(why, "no answer in time") from error
        raise
    finally:
        ended.set()
        watcher.join()


def _moved(report: Any) -> tuple[int, ...]:
    """Everything in a transfer's report that grows while it progresses."""
    numbers = [report.total_bytes_completed, report.total_transfer_bytes_completed]
    if (shard := getattr(report, "shard", None)) is not None:
        numbers += [shard.total_shard_bytes_upload_completed, shard.total_shards_completed]
    return tuple(numbers)


def _check_cache() -> None:
    """Raise NoXet unless hf_xet can write its cache; its own error would not tell."""
    cache = Path(constants.HF_XET_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise NoXet(
            f"HF_XET_CACHE={cache} cannot be written ({error.strerror}), so large files are "
            "transferred without Xet. Free some space there, or set HF_XET_CACHE to another folder."
        ) from error


def _config() -> Any:
    import hf_xet

    return hf_xet.XetConfig().with_config(SETTINGS)


def _in_low_priority(make: Callable[[], Any]) -> Any:
    """The result of `make`, whose own threads inherit a low priority.

    Only hf_xet's threads have it. One that holds Python's lock must not wait for the processor.
    """
    made = []

    def run() -> None:
        if sys.platform == "linux":  # elsewhere the priority is that of the process
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, own + NICENESS))
        made.append(make())

    thread = threading.Thread(target=run, name="xet session")
    thread.start()
    thread.join()
    return made[0]
