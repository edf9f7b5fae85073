"""What the loopback Hub answers about files: uploads, commits, listings and downloads."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from typing import Any
from urllib.parse import parse_qs, quote

from loopback_repos import commit_meant, lfs_of, page, readable, user_of, writable
from loopback_server import Answer, Call, Refusal, Stretch, answers, error_answer, json_answer
from loopback_store import BUCKETS, Add, AddLarge, Bucket, Commit, Delete, Operation, Repo
from loopback_xet import headers_of

MOST_FILES_OF_A_PREUPLOAD = 256
LFS_JSON = "application/vnd.git-lfs+json"


@answers("preupload", "POST", "/api/models/{repo}/preupload/{revision}")
def _preupload(call: Call) -> Answer:
    repo, _ = writable(call)
    there = commit_meant(call, repo).files
    files = call.body.json()["files"]
    if len(files) > MOST_FILES_OF_A_PREUPLOAD:
        raise Refusal(400, f"More than {MOST_FILES_OF_A_PREUPLOAD} files")
    return json_answer(
        {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs"
                    if call.hub.is_large(file["path"], file["size"])
                    else "regular",
                    "shouldIgnore": False,
                    **({"oid": there[file["path"]].etag} if file["path"] in there else {}),
                }
                for file in files
            ]
        }
    )


@answers("batch", "POST", "/{repo}.git/info/lfs/objects/batch")
def _batch(call: Call) -> Answer:
    repo, _ = writable(call)
    wanted = call.body.json()
    if wanted["operation"] != "upload" or wanted.get("hash_algo", "sha256") != "sha256":
        raise Refusal(400, "Only uploads by sha256 are known here")
    objects = [_instructions(call, repo, found) for found in wanted["objects"]]
    answer = json_answer({"transfer": "basic", "objects": objects})
    answer.headers["Content-Type"] = LFS_JSON
    return answer


def _instructions(call: Call, repo: Repo, wanted: dict[str, Any]) -> dict[str, Any]:
    """How to upload one content; without actions where it is there."""
    oid, size, hub = wanted["oid"], wanted["size"], call.hub
    if not re.fullmatch("[0-9a-f]{64}", oid):
        return {"oid": oid, "size": size, "error": {"code": 422, "message": "Invalid oid"}}
    if repo.contents.size_of_large(oid) is not None:
        return {"oid": oid, "size": size}
    upload: dict[str, Any] = {"href": hub.signed("PUT", f"/upload/{repo.id}/{oid}")}
    verify = {"href": f"{hub.endpoint}/{repo.id}.git/info/lfs/objects/verify"}
    return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}}


@answers("put", "PUT", "/upload/{repo}/{oid}")
def _put(call: Call) -> Answer:
    repo, oid = _signed_repo(call), call.names["oid"]
    repo.contents.receive(oid, call.body.blocks())
    call.hub.received(oid)
    return Answer()


@answers("verify", "POST", "/{repo}.git/info/lfs/objects/verify")
def _verify(call: Call) -> Answer:
    repo, _ = writable(call)
    wanted = call.body.json()
    size = repo.contents.size_of_large(wanted["oid"])
    if size is None:
        raise Refusal(404, f"{wanted['oid']} was not uploaded")
    if size != wanted["size"]:
        raise Refusal(400, f"{wanted['oid']} has {size} bytes, not {wanted['size']}")
    return json_answer({"message": "OK"})


@answers("commit", "POST", "/api/models/{repo}/commit/{revision}")
def _commit(call: Call) -> Answer:
    repo, user = writable(call)
    try:
        lines = [json.loads(line) for line in call.body.read().splitlines() if line.strip()]
        if not lines or lines[0]["key"] != "header":
            raise Refusal(400, "The first line is not the header")
        header = lines[0]["value"]
        operations = [_operation(call, line["key"], line["value"]) for line in lines[1:]]
        title = header["summary"]
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(400, f"Invalid commit: {error!r}") from error
    commit = repo.apply(
        call.names["revision"],
        operations,
        title,
        message=header.get("description", ""),
        author=user,
        parent=header.get("parentCommit"),
    )
    url = f"{call.hub.endpoint}/{repo.id}/commit/{commit.id}"
    return json_answer({"success": True, "commitOid": commit.id, "commitUrl": url})


def _operation(call: Call, key: str, value: dict[str, Any]) -> Operation:
    path = value["path"]
    if key == "file":
        if value.get("encoding") != "base64":
            raise Refusal(400, f"{path} is not in base64")
        content = b64decode(value["content"], validate=True)
        if content and call.hub.is_large(path, len(content)):
            raise Refusal(400, f"{path} must be uploaded as a large file")
        return Add(path, content)
    if key == "lfsFile":
        if value.get("algo") != "sha256":
            raise Refusal(400, f"{path} is not named by its sha256")
        return AddLarge(path, value["oid"], value.get("size"))
    if key in ("deletedFile", "deletedFolder"):
        return Delete(path, is_folder=key == "deletedFolder")
    raise Refusal(400, f"Unknown operation {key}")


@answers("tree", "GET", "/api/models/{repo}/tree/{revision}")
@answers("tree", "GET", "/api/models/{repo}/tree/{revision}/{path}")
def _tree(call: Call) -> Answer:
    repo = readable(call)
    commit = commit_meant(call, repo)
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
    if not _is_true(call, "recursive"):
        names = {name for name in names if "/" not in name}
    return page(call, [_line(call, repo, commit, inside + name) for name in sorted(names)])


@answers("paths-info", "POST", "/api/models/{repo}/paths-info/{revision}")
def _paths_info(call: Call) -> Answer:
    repo = readable(call)
    commit = commit_meant(call, repo)
    form = parse_qs(call.body.read().decode())
    folders = {path[:at] for path in commit.files for at, sign in enumerate(path) if sign == "/"}
    there = [path for path in form.get("paths", []) if path in commit.files or path in folders]
    return json_answer([_line(call, repo, commit, path) for path in there])


def _is_true(call: Call, name: str) -> bool:
    return call.query.get(name, [""])[0].lower() in ("true", "1")


def _line(call: Call, repo: Repo, commit: Commit, path: str) -> dict[str, Any]:
    """A file or a folder in a listing."""
    line: dict[str, Any] = {"type": "directory", "path": path, "size": 0}
    if entry := commit.files.get(path):
        line.update(type="file", oid=entry.git_oid, size=entry.size)
        if entry.is_lfs:
            line["lfs"] = lfs_of(call, entry)
            if found := call.hub.xet.hash_of(entry.sha256):
                line["xetHash"] = found
    else:
        line["oid"] = repo.oid_of_folder(commit, path)
    return line


@answers("resolve-head", "HEAD", "/{repo}/resolve/{revision}/{path}")
@answers("resolve-get", "GET", "/{repo}/resolve/{revision}/{path}")
def _resolve(call: Call) -> Answer:
    repo = readable(call)
    commit = commit_meant(call, repo)
    path = call.names["path"]
    if repo.gated:
        has_token = user_of(call) is not None
        said = f"Access to model {repo.id} is restricted."
        raise Refusal(403 if has_token else 401, said, "GatedRepo")
    entry = commit.files.get(path)
    if entry is None:
        return _no_entry(path, commit)
    headers = {"X-Repo-Commit": commit.id, "ETag": f'"{entry.etag}"'}
    if not entry.is_lfs:
        return _content(call, repo, entry.sha256, headers)
    place = call.hub.signed("GET", f"/blob/{repo.id}/{entry.sha256}")
    headers |= headers_of(call, repo, call.names["revision"], entry)
    headers |= {"Location": place, "X-Linked-ETag": headers["ETag"], "Accept-Ranges": "bytes"}
    return Answer(302, headers={**headers, "X-Linked-Size": str(entry.size)})


def _no_entry(path: str, commit: Commit) -> Answer:
    said = f"Entry not found: {quote(path)}"
    return error_answer(404, said, "EntryNotFound", X_Repo_Commit=commit.id)


@answers("blob-get", "GET", "/blob/{repo}/{oid}")
def _blob(call: Call) -> Answer:
    repo, oid = _signed_repo(call), call.names["oid"]
    if repo.contents.size_of_large(oid) is None:
        raise Refusal(404, f"There is no {oid}")
    return _content(call, repo, oid, {"ETag": f'"{oid}"'})


@answers("bucket-get", "GET", "/buckets/{repo}/resolve/{path}")
def _bucket_get(call: Call) -> Answer:
    bucket = readable(call, BUCKETS + call.names["repo"])
    stored = bucket.files.get(call.names["path"])
    if stored is None:
        return error_answer(404, "Entry not found", "EntryNotFound")
    return _content(call, bucket, stored.sha256, {"ETag": f'"{stored.xet_hash}"'})


def _content(call: Call, repo: Repo | Bucket, sha256: str, headers: dict[str, str]) -> Answer:
    """A content, or the range of it that the request asks for."""
    path = repo.contents.path(sha256)
    size = path.stat().st_size
    headers |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", call.headers.get("Range", ""))
    if asked is None or asked[0] == "bytes=-":
        return Answer(200, Stretch(path, 0, size), headers)
    start = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
    end = min(int(asked[2]) + 1, size) if asked[1] and asked[2] else size
    if start >= end:
        return Answer(416, headers={"Content-Range": f"bytes */{size}"})
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return Answer(206, Stretch(path, start, end - start), headers)


def _signed_repo(call: Call) -> Repo:
    """The repo of a signed address, which needs no token and, as at S3, bears none."""
    if "Authorization" in call.headers:
        raise Refusal(400, "Only one auth mechanism allowed", "InvalidArgument")
    if call.query.get("signature") != [call.hub.signature(call.method, call.path)]:
        raise Refusal(403, "The signature does not match", "SignatureDoesNotMatch")
    repo = call.hub.repo(call.names["repo"])
    if repo is None:
        raise Refusal(404, "There is no such bucket", "NoSuchBucket")
    return repo
