"""What the loopback Hub answers about files: uploads, commits, listings and downloads.

A repo's commit is atomic. A bucket has no commits: the operations of a batch are applied one by
one. Source: the requests of huggingface_hub 2.4.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from typing import Any
from urllib.parse import parse_qs, quote

from loopback_repos import as_date, check_signature, commit_meant, readable, signed, writable
from loopback_server import Answer, Call, Refusal, answers, error_answer, json_answer
from loopback_store import BUCKETS, Bucket, Commit, Entry, Repo, Stored, small
from loopback_xet import headers_of


@answers("preupload", "POST", "/api/models/{repo}/preupload/{revision}")
def _preupload(call: Call) -> Answer:
    there = commit_meant(call, writable(call)).files
    found = []
    for file in call.json()["files"]:
        path = file["path"]
        mode = "lfs" if call.hub.is_large(path, file["size"]) else "regular"
        oid = {"oid": there[path].etag} if path in there else {}
        found.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **oid})
    return json_answer({"files": found})


@answers("batch", "POST", "/{repo}.git/info/lfs/objects/batch")
def _batch(call: Call) -> Answer:
    """How a client without Xet uploads contents; no actions for one that is there."""
    repo, objects = writable(call), []
    for wanted in call.json()["objects"]:
        oid = wanted["oid"]
        upload = {"href": signed(call, "PUT", f"/upload/{repo.id}/{oid}")}
        actions = {} if oid in repo.large else {"actions": {"upload": upload}}
        objects.append({"oid": oid, "size": wanted["size"], **actions})
    answer = json_answer({"transfer": "basic", "objects": objects})
    answer.headers["Content-Type"] = "application/vnd.git-lfs+json"
    return answer


@answers("put", "PUT", "/upload/{repo}/{oid}")
def _put(call: Call) -> Answer:
    check_signature(call)
    call.hub.repo(call.names["repo"]).receive(call.names["oid"], call.body)
    call.hub.uploaded[call.names["oid"]] += 1
    return Answer()


@answers("commit", "POST", "/api/models/{repo}/commit/{revision}")
def _commit(call: Call) -> Answer:
    repo: Repo = writable(call)
    changes: dict[str, Entry | None] = {}
    try:
        header, *lines = [json.loads(line) for line in call.body.splitlines() if line.strip()]
        if header["key"] != "header":
            raise Refusal(400, "The first line is not the header")
        for line in lines:
            changes |= _change(call, repo, line["key"], line["value"])
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(400, f"Invalid commit: {error!a}") from error
    commit = repo.apply(call.names["revision"], changes, header["value"].get("parentCommit"))
    url = f"{call.hub.endpoint}/{repo.id}/commit/{commit}"
    return json_answer({"success": True, "commitOid": commit, "commitUrl": url})


def _change(call: Call, repo: Repo, key: str, value: dict[str, Any]) -> dict[str, Entry | None]:
    """What a line of a commit does to a path."""
    path = value["path"]
    if key == "file":
        content = b64decode(value["content"], validate=True)
        if content and call.hub.is_large(path, len(content)):
            raise Refusal(400, f"{path!a} must be uploaded as a large file")
        return {path: small(content)}
    if key == "lfsFile":
        return {path: repo.uploaded(path, value["oid"], value.get("size"))}
    if key == "deletedFile":
        return {path: None}
    if key == "deletedFolder":
        return {path.removesuffix("/") + "/": None}
    raise Refusal(400, f"Unknown operation {key!a}")


@answers("tree", "GET", "/api/models/{repo}/tree/{revision}")
@answers("tree", "GET", "/api/models/{repo}/tree/{revision}/{path}")
def _tree(call: Call) -> Answer:
    commit = commit_meant(call, readable(call))
    folder = call.names.get("path", "").strip("/")
    inside = f"{folder}/" if folder else ""
    below = [path.removeprefix(inside) for path in commit.files if path.startswith(inside)]
    if folder and not below:
        return _no_entry(folder, commit)
    names = {
        "/".join(path.split("/")[: depth + 1])
        for path in below
        for depth in range(path.count("/") + 1)
    }
    if call.query.get("recursive", [""])[0].lower() not in ("true", "1"):
        names = {name for name in names if "/" not in name}
    return json_answer([_line(call, commit, inside + name) for name in sorted(names)])


@answers("paths-info", "POST", "/api/models/{repo}/paths-info/{revision}")
def _paths_info(call: Call) -> Answer:
    commit = commit_meant(call, readable(call))
    folders = {path[:at] for path in commit.files for at, sign in enumerate(path) if sign == "/"}
    asked = parse_qs(call.body.decode()).get("paths", [])
    there = [path for path in asked if path in commit.files or path in folders]
    return json_answer([_line(call, commit, path) for path in there])


def _line(call: Call, commit: Commit, path: str) -> dict[str, Any]:
    """A file or a folder in a listing."""
    entry = commit.files.get(path)
    if entry is None:
        return {"type": "directory", "path": path, "size": 0, "oid": commit.id}
    line = {"type": "file", "path": path, "size": entry.size, "oid": entry.git_oid}
    if entry.is_lfs:
        line["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": 134}
        if found := call.hub.xet.hashes.get(entry.sha256):
            line["xetHash"] = found
    return line


@answers("resolve-head", "HEAD", "/{repo}/resolve/{revision}/{path}")
@answers("resolve-get", "GET", "/{repo}/resolve/{revision}/{path}")
def _resolve(call: Call) -> Answer:
    repo: Repo = readable(call)
    commit, path = commit_meant(call, repo), call.names["path"]
    if repo.gated:
        status = 403 if "Authorization" in call.headers else 401
        raise Refusal(status, f"Access to model {repo.id} is restricted.", "GatedRepo")
    entry = commit.files.get(path)
    if entry is None:
        return _no_entry(path, commit)
    headers = {"X-Repo-Commit": commit.id, "ETag": f'"{entry.etag}"', "Accept-Ranges": "bytes"}
    if not entry.is_lfs:
        return _part(call, repo.content(entry), headers)
    headers |= headers_of(call, repo, call.names["revision"], entry)
    headers["Location"] = signed(call, "GET", f"/blob/{repo.id}/{entry.sha256}")
    headers |= {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(entry.size)}
    return Answer(302, headers=headers)


def _no_entry(path: str, commit: Commit) -> Answer:
    said = f"Entry not found: {quote(path)}"
    return error_answer(404, said, "EntryNotFound", X_Repo_Commit=commit.id)


@answers("blob-get", "GET", "/blob/{repo}/{oid}")
def _blob(call: Call) -> Answer:
    check_signature(call)
    oid, repo = call.names["oid"], call.hub.repo(call.names["repo"])
    if repo is None or oid not in repo.large:
        raise Refusal(404, f"There is no {oid}")
    return _part(call, repo.large[oid], {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})


def _part(call: Call, content: bytes, headers: dict[str, str]) -> Answer:
    """A content, or the range of it that the request asks for."""
    size = len(content)
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", call.headers.get("Range", ""))
    if asked is None or asked[0] == "bytes=-":
        return Answer(200, content, headers)
    start = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
    end = min(int(asked[2]) + 1, size) if asked[1] and asked[2] else size
    if start >= end:
        return Answer(416, headers={"Content-Range": f"bytes */{size}"})
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return Answer(206, content[start:end], headers)


# Buckets


def _bucket(call: Call) -> Bucket:
    return readable(call, BUCKETS + call.names["repo"])


@answers("bucket-info", "GET", "/api/buckets/{repo}")
def _bucket_info(call: Call) -> Answer:
    bucket = _bucket(call)
    return json_answer(
        {
            "id": bucket.id.removeprefix(BUCKETS),
            "private": bucket.private,
            "createdAt": as_date(bucket.created),
            "size": sum(one.size for one in bucket.files.values()),
            "totalFiles": len(bucket.files),
        }
    )


@answers("bucket-tree", "GET", "/api/buckets/{repo}/tree")
@answers("bucket-tree", "GET", "/api/buckets/{repo}/tree/{path}")
def _bucket_tree(call: Call) -> Answer:
    prefix = call.names.get("path", "")
    return json_answer(
        [
            {"type": "file", "path": path, "size": one.size, "xetHash": one.xet_hash}
            for path, one in sorted(_bucket(call).files.items())
            if path.startswith(prefix)
        ]
    )


@answers("bucket-batch", "POST", "/api/buckets/{repo}/batch")
def _bucket_batch(call: Call) -> Answer:
    bucket = writable(call, BUCKETS + call.names["repo"])
    operations = [json.loads(line) for line in call.body.splitlines()]
    errors = [(operation["path"], _applied(call, bucket, operation)) for operation in operations]
    failed = [{"path": path, "error": error} for path, error in errors if error]
    done = len(operations) - len(failed)
    status = 422 if failed and not done else 200
    return json_answer({"success": not failed, "processed": done, "failed": failed}, status)


def _applied(call: Call, bucket: Bucket, operation: dict[str, Any]) -> str:
    """Apply an operation of a batch; why it cannot be, or an empty text."""
    path = operation["path"]
    if operation["type"] == "deleteFile":
        return "" if bucket.files.pop(path, None) else "File not found"
    assert operation["type"] == "addFile", operation
    content = call.hub.xet.files.get(operation["xetHash"])
    if content is None:
        return f"There is no content {operation['xetHash']}"
    sha256 = call.hub.xet.keep(operation["xetHash"], content)
    bucket.files[path] = Stored(len(content), operation["xetHash"], sha256)
    return ""


@answers("bucket-get", "GET", "/buckets/{repo}/resolve/{path}")
def _bucket_get(call: Call) -> Answer:
    bucket, path = _bucket(call), call.names["path"]
    stored = bucket.files.get(path)
    if stored is None:
        return error_answer(404, "Entry not found", "EntryNotFound")
    return _part(call, bucket.read(path), {"ETag": f'"{stored.xet_hash}"'})
