"""Buckets, as the loopback Hub answers them: files without commits, all of them in Xet storage.

A batch is not atomic: its operations are applied one by one. Source: the requests of
huggingface_hub 2.4.
"""

from __future__ import annotations

import json
from typing import Any

from loopback_repos import as_date, page, readable, writable
from loopback_server import Answer, Call, answers, json_answer
from loopback_store import BUCKETS, Bucket, Stored


def _readable(call: Call) -> Bucket:
    return readable(call, BUCKETS + call.names["repo"])


def _writable(call: Call) -> Bucket:
    return writable(call, BUCKETS + call.names["repo"])[0]


@answers("bucket-info", "GET", "/api/buckets/{repo}")
def _info(call: Call) -> Answer:
    bucket = _readable(call)
    files = bucket.files
    return json_answer(
        {
            "id": bucket.id.removeprefix(BUCKETS),
            "private": bucket.private,
            "createdAt": as_date(bucket.created),
            "size": sum(one.size for one in files.values()),
            "totalFiles": len(files),
        }
    )


@answers("bucket-tree", "GET", "/api/buckets/{repo}/tree")
@answers("bucket-tree", "GET", "/api/buckets/{repo}/tree/{path}")
def _tree(call: Call) -> Answer:
    prefix = call.names.get("path", "")
    lines: list[dict[str, Any]] = [
        {"type": "file", "path": path, "size": one.size, "xetHash": one.xet_hash}
        for path, one in sorted(_readable(call).files.items())
        if path.startswith(prefix)
    ]
    return page(call, lines)


@answers("bucket-batch", "POST", "/api/buckets/{repo}/batch")
def _batch(call: Call) -> Answer:
    bucket = _writable(call)
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
