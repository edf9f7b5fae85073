"""Which function of the loopback Hub answers a request, and what those functions share."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlencode

from loopback_contents import Refusal, pointer
from loopback_messages import Answer, Call, Route, json_answer
from loopback_store import Commit, Entry, Repo

if TYPE_CHECKING:
    from loopback_hub import Token

HUB, BLOBS = "hub", "blobs"
"""The two origins."""
SPACES, DATASETS = "spaces/", "datasets/"
"""Before the name of a repo that is a Space, or a data set."""
PARTS = {"repo": f"(?:{SPACES}|{DATASETS})?[^/]+/[^/]+", "path": ".+"}
Found = tuple[str, Route, dict[str, str]]
"""An endpoint, its function, and the variable parts of the path, decoded."""


class Routes:
    """The endpoints of one file."""

    def __init__(self) -> None:
        self._routes: list[tuple[str, str, re.Pattern[str], str, Route]] = []

    def answers(
        self, endpoint: str, method: str, path: str, origin: str = HUB
    ) -> Callable[[Route], Route]:
        """Make a function that of an endpoint. `{name}` stands for a variable part of the path."""
        shape = re.sub(r"\{(\w+)\}", lambda at: f"(?P<{at[1]}>{PARTS.get(at[1], '[^/]+')})", path)

        def note(route: Route) -> Route:
            self._routes.append((origin, method, re.compile(shape), endpoint, route))
            return route

        return note

    def find(self, origin: str, method: str, path: str) -> Found | None:
        """Who answers a request. What is known of models is known of Spaces and data sets."""
        path = re.sub(f"^/api/({SPACES}|{DATASETS})", r"/api/models/\1", path)
        for *place, pattern, endpoint, route in self._routes:
            if place == [origin, method] and (match := pattern.fullmatch(path)):
                names = {name: unquote(part) for name, part in match.groupdict().items()}
                return endpoint, route, names
        return None


def unknown(call: Call) -> Answer:
    """For what no file knows."""
    raise Refusal(404, f"The loopback Hub does not know {call.method} {call.path}")


def user_of(call: Call) -> Token | None:
    """Whose token the request carries; None without one."""
    return call.hub.token(call.headers.get("Authorization"))


def readable(call: Call, repo_id: str = "") -> Repo:
    """The repo a request is about. One that may not be seen is answered like one that is not."""
    token = user_of(call)
    repo_id = repo_id or call.names["repo"]
    repo = call.hub.repo(repo_id)
    if repo is None or (repo.private and (token is None or token.user != repo.owner)):
        if token is None:
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")
        raise Refusal(404, "Repository not found", "RepoNotFound")
    return repo


def writable(call: Call, repo_id: str = "") -> tuple[Repo, str]:
    """The repo a request is about, and the user, if the token may write there."""
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
    prefix = "sha256:" if call.hub.deviations.prefixed_hashes else ""
    return {"oid": prefix + entry.sha256, "size": entry.size, "pointerSize": size}


def as_date(date: datetime) -> str:
    """A date as the Hub writes it."""
    return date.strftime("%Y-%m-%dT%H:%M:%S.") + f"{date.microsecond // 1000:03d}Z"
