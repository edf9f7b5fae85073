"""What the loopback Hub answers about users, repos, their history and their refs."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from loopback_server import SPACES, Answer, Call, Refusal, answers, json_answer
from loopback_store import Commit, Entry, Repo, pointer

PULL = "pr/"
"""Branches of that name stand for pull requests."""


def user_of(call: Call) -> Any:
    """Whose token the request carries; None without one."""
    return call.hub.token(call.headers.get("Authorization"))


def readable(call: Call, repo_id: str = "") -> Any:
    """The repo or bucket a request is about. One that may not be seen is answered as none."""
    token = user_of(call)
    repo_id = repo_id or call.names["repo"]
    repo = call.hub.repo(repo_id)
    if repo is None or (repo.private and (token is None or token.user != repo.owner)):
        if token is None:
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")
        raise Refusal(404, "Repository not found", "RepoNotFound")
    return repo


def writable(call: Call, repo_id: str = "") -> tuple[Any, str]:
    """The repo or bucket a request is about, and the user, if the token may write there."""
    repo = readable(call, repo_id)
    return repo, writer(call, repo.owner)


def writer(call: Call, owner: str) -> str:
    """The user, if the token may write where `owner` owns."""
    token = user_of(call)
    if token is None:
        raise Refusal(401, "Invalid username or password.")
    if token.role == "read" or token.user != owner:
        raise Refusal(403, f"You don't have the rights to write under the namespace {owner!r}")
    return token.user


def commit_meant(call: Call, repo: Repo) -> Commit:
    """The commit of the request's revision, main without one."""
    return repo.resolve(call.names.get("revision", "main"), stale="stale-head" in call.changes)


def page(call: Call, lines: list[dict[str, Any]]) -> Answer:
    """The page of a listing that the request asks for, with the address of the next."""
    start = int(call.query.get("cursor", ["0"])[0])
    end = start + call.hub.page_size
    answer = json_answer(lines[start:end])
    if end < len(lines):
        query = urlencode({**call.query, "cursor": end}, doseq=True)
        answer.headers["Link"] = f'<{call.hub.endpoint}{call.path}?{query}>; rel="next"'
    return answer


def lfs_of(call: Call, entry: Entry) -> dict[str, Any]:
    """What listings say about a large file."""
    size = len(pointer(entry.sha256, entry.size))
    return {"oid": entry.sha256, "size": entry.size, "pointerSize": size}


def as_date(date: datetime) -> str:
    """A date as the Hub writes it."""
    return date.strftime("%Y-%m-%dT%H:%M:%S.") + f"{date.microsecond // 1000:03d}Z"


@answers("whoami", "GET", "/api/whoami-v2")
def _whoami(call: Call) -> Answer:
    token = user_of(call)
    if token is None:
        raise Refusal(401, "Invalid username or password.")
    access = {"displayName": "loopback", "role": token.role}
    auth = {"type": "access_token", "accessToken": access}
    return json_answer({"type": "user", "name": token.user, "orgs": [], "auth": auth})


@answers("create", "POST", "/api/repos/create")
def _create(call: Call) -> Answer:
    wanted = call.body.json()
    token = user_of(call)
    owner = wanted.get("organization") or (token.user if token else "")
    writer(call, owner)
    is_space = wanted.get("type") == "space"
    if is_space and not wanted.get("sdk"):
        raise Refusal(400, "A Space needs an sdk")
    repo_id = f"{SPACES if is_space else ''}{owner}/{wanted['name']}"
    answer = {"url": f"{call.hub.endpoint}/{repo_id}", "name": repo_id}
    if call.hub.repo(repo_id) is not None:
        error = "You already created this model repo"
        return json_answer({"error": error, **answer}, 409, X_Error_Message=error)
    private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
    call.hub.create(repo_id, private=private)
    return json_answer(answer)


@answers("delete", "DELETE", "/api/repos/delete")
def _delete(call: Call) -> Answer:
    wanted = call.body.json()
    token = user_of(call)
    owner = wanted.get("organization") or (token.user if token else "")
    repo, _ = writable(call, f"{owner}/{wanted['name']}")
    call.hub.delete(repo.id)
    return json_answer({})


@answers("info", "GET", "/api/models/{repo}")
@answers("info", "GET", "/api/models/{repo}/revision/{revision}")
def _info(call: Call) -> Answer:
    repo = readable(call)
    commit = commit_meant(call, repo)
    siblings: list[dict[str, Any]] = [{"rfilename": path} for path in sorted(commit.files)]
    return json_answer(
        {
            "id": repo.id,
            "sha": commit.id,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "lastModified": as_date(commit.date),
            "siblings": siblings,
        }
    )


@answers("refs", "GET", "/api/models/{repo}/refs")
def _refs(call: Call) -> Answer:
    repo = readable(call)
    kinds = {"branches": ("heads", repo.branches), "tags": ("tags", repo.tags)}
    refs: dict[str, list[dict[str, str]]] = {
        kind: [
            {"name": name, "ref": f"refs/{place}/{name}", "targetCommit": commit}
            for name, commit in sorted(found.items())
        ]
        for kind, (place, found) in kinds.items()
    }
    pulls = [one for one in refs["branches"] if one["name"].startswith(PULL)]
    refs["branches"] = [one for one in refs["branches"] if one not in pulls]
    if "include_prs" in call.query:
        refs["pullRequests"] = [{**one, "ref": f"refs/{one['name']}"} for one in pulls]
    return json_answer({**refs, "converts": []})


@answers("branch", "POST", "/api/models/{repo}/branch/{branch}")
def _create_branch(call: Call) -> Answer:
    repo, _ = writable(call)
    repo.create_branch(call.names["branch"], call.body.json().get("startingPoint") or "main")
    return json_answer({})


@answers("tag", "POST", "/api/models/{repo}/tag/{revision}")
def _create_tag(call: Call) -> Answer:
    repo, _ = writable(call)
    repo.create_tag(call.body.json()["tag"], call.names["revision"])
    return json_answer({})


@answers("lfs-delete", "POST", "/api/models/{repo}/lfs-files/batch")
def _delete_large(call: Call) -> Answer:
    repo, _ = writable(call)
    wanted = call.body.json()["deletions"]
    if wanted["rewriteHistory"]:
        raise Refusal(400, "The loopback Hub rewrites no history")
    for sha256 in wanted["sha"]:
        repo.contents.forget(sha256)
        call.hub.xet.forget(sha256)
    return json_answer({})


@answers("validate-yaml", "POST", "/api/validate-yaml")
def _validate_yaml(call: Call) -> Answer:
    return json_answer({"errors": [], "warnings": []})
