"""What the loopback Hub answers about users, repos and their refs, and who may do what."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from loopback_server import Answer, Call, Refusal, answers, json_answer
from loopback_store import Commit, Repo

PULL = "pr/"
"""Branches of that name stand for pull requests."""


def user_of(call: Call) -> Any:
    """Whose token the request carries; None without one."""
    return call.hub.token(call.headers.get("Authorization"))


def readable(call: Call, repo_id: str = "") -> Any:
    """The repo or bucket a request is about. One that may not be seen is answered as none."""
    token = user_of(call)
    repo = call.hub.repo(repo_id or call.names["repo"])
    if repo is None or (repo.private and (token is None or token.user != repo.owner)):
        if token is None:
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")
        raise Refusal(404, "Repository not found", "RepoNotFound")
    return repo


def writable(call: Call, repo_id: str = "") -> Any:
    """The repo or bucket a request is about, if the token may write there."""
    repo = readable(call, repo_id)
    check_writer(call, repo.owner)
    return repo


def check_writer(call: Call, owner: str) -> None:
    """Raises Refusal where the token may not write what `owner` owns."""
    token = user_of(call)
    if token is None:
        raise Refusal(401, "Invalid username or password.")
    if token.role == "read" or token.user != owner:
        raise Refusal(403, f"You don't have the rights to write under the namespace {owner!r}")


def signed(call: Call, method: str, path: str) -> str:
    """An address of a large content, which needs no token."""
    return f"{call.hub.contents_endpoint}{path}?signature={call.hub.signature(method, path)}"


def check_signature(call: Call) -> None:
    """Raises Refusal for an address that is not signed, or that a token goes to: as S3 does."""
    if "Authorization" in call.headers:
        raise Refusal(400, "Only one auth mechanism allowed", "InvalidArgument")
    if call.query.get("signature") != [call.hub.signature(call.method, call.path)]:
        raise Refusal(403, "The signature does not match", "SignatureDoesNotMatch")


def commit_meant(call: Call, repo: Repo) -> Commit:
    """The commit of the request's revision, main without one."""
    revision = call.names.get("revision", "main")
    return repo.commit(revision.removeprefix("refs/heads/").removeprefix("refs/tags/"))


def as_date(date: datetime) -> str:
    """A date as the Hub writes it."""
    return date.strftime("%Y-%m-%dT%H:%M:%S.000Z")


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
    wanted, token = call.json(), user_of(call)
    owner = wanted.get("organization") or (token.user if token else "")
    check_writer(call, owner)
    repo_id = f"{owner}/{wanted['name']}"
    answer = {"url": f"{call.hub.endpoint}/{repo_id}", "name": repo_id}
    if call.hub.repo(repo_id) is not None:
        error = "You already created this model repo"
        return json_answer({"error": error, **answer}, 409, X_Error_Message=error)
    call.hub.create(repo_id, wanted.get("visibility") == "private" or bool(wanted.get("private")))
    return json_answer(answer)


@answers("delete", "DELETE", "/api/repos/delete")
def _delete(call: Call) -> Answer:
    wanted, token = call.json(), user_of(call)
    owner = wanted.get("organization") or (token.user if token else "")
    call.hub.delete(writable(call, f"{owner}/{wanted['name']}").id)
    return json_answer({})


@answers("info", "GET", "/api/models/{repo}")
@answers("info", "GET", "/api/models/{repo}/revision/{revision}")
def _info(call: Call) -> Answer:
    repo = readable(call)
    commit = commit_meant(call, repo)
    return json_answer(
        {
            "id": repo.id,
            "sha": commit.id,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "lastModified": as_date(commit.date),
            "siblings": [{"rfilename": path} for path in sorted(commit.files)],
        }
    )


@answers("refs", "GET", "/api/models/{repo}/refs")
def _refs(call: Call) -> Answer:
    repo = readable(call)
    branches = {name: at for name, at in repo.branches.items() if not name.startswith(PULL)}
    pulls = {name: at for name, at in repo.branches.items() if name.startswith(PULL)}
    kinds = {"branches": ("refs/heads/", branches), "tags": ("refs/tags/", repo.tags)}
    if "include_prs" in call.query:
        kinds["pullRequests"] = ("refs/", pulls)
    return json_answer(
        {
            "converts": [],
            **{
                kind: [
                    {"name": name, "ref": place + name, "targetCommit": commit}
                    for name, commit in sorted(found.items())
                ]
                for kind, (place, found) in kinds.items()
            },
        }
    )


@answers("branch", "POST", "/api/models/{repo}/branch/{branch}")
def _create_branch(call: Call) -> Answer:
    return _ref(call, writable(call).branches, call.names["branch"])


@answers("tag", "POST", "/api/models/{repo}/tag/{revision}")
def _create_tag(call: Call) -> Answer:
    return _ref(call, writable(call).tags, call.json()["tag"])


def _ref(call: Call, refs: dict[str, str], name: str) -> Answer:
    """Make a branch, or a tag, of the request's revision."""
    if name in refs:
        raise Refusal(409, f"Reference already exists: {name}")
    refs[name] = commit_meant(call, readable(call)).id
    return json_answer({})


@answers("lfs-delete", "POST", "/api/models/{repo}/lfs-files/batch")
def _delete_large(call: Call) -> Answer:
    repo, wanted = writable(call), call.json()["deletions"]
    if wanted["rewriteHistory"]:
        raise Refusal(400, "The loopback Hub rewrites no history")
    for sha256 in wanted["sha"]:
        repo.large.pop(sha256, None)
        call.hub.xet.forget(sha256)
    return json_answer({})


@answers("validate-yaml", "POST", "/api/validate-yaml")
def _validate_yaml(call: Call) -> Answer:
    return json_answer({"errors": [], "warnings": []})
