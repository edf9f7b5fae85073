"""Buckets, as the loopback Hub answers them: files without commits, all of them in Xet storage.

A batch is not atomic: its operations are applied one by one. Source: the requests of
huggingface_hub 2.4.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loopback_contents import Contents, Refusal
from loopback_messages import Answer, Call, json_answer
from loopback_routes import Routes, as_date, page, user_of, writer

ROUTES = Routes()


@dataclass(frozen=True)
class Stored:
    """A file of a bucket."""

    size: int
    xet_hash: str
    sha256: str


class Bucket:
    """One bucket. Every method may be called from several threads."""

    def __init__(self, bucket_id: str, folder: Path, private: bool) -> None:
        self.id, self.private = bucket_id, private
        self.owner = bucket_id.partition("/")[0]
        self.created = datetime.now(UTC)
        self.contents = Contents(folder)
        self._lock = threading.RLock()
        self._files: dict[str, Stored] = {}

    @property
    def files(self) -> dict[str, Stored]:
        """The files by path."""
        with self._lock:
            return dict(self._files)

    def read(self, path: str) -> bytes:
        """The content of a file."""
        return self.contents.path(self.files[path].sha256).read_bytes()

    def put(self, path: str, stored: Stored | None) -> None:
        """Add or replace a file, or remove it; None for the latter."""
        with self._lock:
            if stored is None:
                self._files.pop(path, None)
            else:
                self._files[path] = stored


@ROUTES.answers("bucket-create", "POST", "/api/buckets/{repo}")
def _create(call: Call) -> Answer:
    bucket_id = call.names["repo"]
    writer(call, bucket_id.partition("/")[0])
    answer = {"url": f"{call.hub.endpoint}/buckets/{bucket_id}"}
    if call.hub.bucket(bucket_id) is not None:
        error = "You already created this bucket"
        return json_answer({"error": error, **answer}, 409, X_Error_Message=error)
    private = call.body.json().get("visibility") == "private"
    call.hub.create_bucket(bucket_id, private)
    return json_answer(answer)


@ROUTES.answers("bucket-delete", "DELETE", "/api/buckets/{repo}")
def _delete(call: Call) -> Answer:
    call.hub.delete_bucket(writable(call).id)
    return json_answer({})


@ROUTES.answers("bucket-info", "GET", "/api/buckets/{repo}")
def _info(call: Call) -> Answer:
    bucket = readable(call)
    files = bucket.files
    return json_answer(
        {
            "id": bucket.id,
            "private": bucket.private,
            "createdAt": as_date(bucket.created),
            "size": sum(one.size for one in files.values()),
            "totalFiles": len(files),
        }
    )


@ROUTES.answers("bucket-tree", "GET", "/api/buckets/{repo}/tree")
@ROUTES.answers("bucket-tree", "GET", "/api/buckets/{repo}/tree/{path}")
def _tree(call: Call) -> Answer:
    prefix = call.names.get("path", "")
    lines: list[dict[str, Any]] = [
        {"type": "file", "path": path, "size": one.size, "xetHash": one.xet_hash}
        for path, one in sorted(readable(call).files.items())
        if path.startswith(prefix)
    ]
    return page(call, lines)


@ROUTES.answers("bucket-batch", "POST", "/api/buckets/{repo}/batch")
def _batch(call: Call) -> Answer:
    bucket = writable(call)
    operations = [json.loads(line) for line in call.body.read().splitlines()]
    failed = []
    half = len(operations) // 2 if "partial" in call.changes else len(operations)
    for number, operation in enumerate(operations):
        error = "Internal error" if number >= half else _applied(call, bucket, operation)
        if error:
            failed.append({"path": operation["path"], "error": error})
    done = len(operations) - len(failed)
    status = 422 if failed and not done else 200
    return json_answer({"success": not failed, "processed": done, "failed": failed}, status)


def _applied(call: Call, bucket: Bucket, operation: dict[str, Any]) -> str:
    """Apply an operation of a batch; why it cannot be, or an empty text."""
    path = operation["path"]
    if any(part in ("", ".", "..") for part in path.split("/")):
        return f"Invalid path: {path!r}"
    if operation["type"] == "deleteFile":
        if path not in bucket.files:
            return "File not found"
        bucket.put(path, None)
        return ""
    assert operation["type"] == "addFile", operation
    sha256 = call.hub.xet.sha256_of(operation["xetHash"])
    if sha256 is None or bucket.contents.size_of_large(sha256) is None:
        return f"There is no content {operation['xetHash']}"
    size = bucket.contents.size_of_large(sha256)
    assert size is not None
    bucket.put(path, Stored(size, operation["xetHash"], sha256))
    return ""


def readable(call: Call) -> Bucket:
    """The bucket a request is about, if the token may see it."""
    token = user_of(call)
    bucket = call.hub.bucket(call.names["repo"])
    if bucket is None or (bucket.private and (token is None or token.user != bucket.owner)):
        if token is None:
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")
        raise Refusal(404, "Bucket not found", "RepoNotFound")
    return bucket


def writable(call: Call) -> Bucket:
    """The bucket a request is about, if the token may write there."""
    bucket = readable(call)
    writer(call, bucket.owner)
    return bucket


def named(files: dict[str, Stored], prefix: str) -> Iterator[str]:
    """The paths below a prefix."""
    return (path for path in files if path.startswith(prefix))
