"""One attempt of a run and its repo: whose the repo is, what a commit builds on, when to squash."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from snapshot.errors import SnapshotError
from snapshot.hub.client import Hub
from snapshot.hub.errors import HubError, HubMoved, HubNoRevision, HubRefused
from snapshot.hub.fetch import foreign_content, look_at
from snapshot.hub.latest import Latest
from snapshot.hub.publish import Policy, Upload, described, publish


class Fenced(Exception):
    """Another attempt, or something else, has the repo. The message is a sentence."""


class Attempt:
    """What an attempt knows of its repo. Not for several threads at a time."""

    def __init__(
        self,
        hub: Hub,
        policy: Policy,
        run_id: str,
        attempt_id: str,
        seen: Latest | None,
        ended: Collection[str],
        unknown: bool,
        say: Callable[[str], None],
    ) -> None:
        """As snapshot.hub.uploader.Uploader; `say` takes sentences for the person at the run."""
        self._hub, self._policy, self._say = hub, policy, say
        self._run_id, self._attempt_id = run_id, attempt_id
        self._seen, self._ended = seen, frozenset(ended)
        self.is_known = not unknown
        """Whether the repo has been asked what it holds."""
        self._head: str | None = None
        """The commit of our last upload."""
        self._latest = seen
        self._commits = seen.commits if seen is not None else 0
        self._can_squash = True
        self._said_no_squash = False
        self._may_take = policy.takeover
        """Once: afterwards another's takeover ends this attempt's uploads as well."""

    def bring(self, upload: Upload) -> None:
        """Upload a snapshot, unless it is there.

        Raises Fenced, SnapshotError and OSError as `publish` does, and HubError.
        """
        try:
            self._bring(upload)
        except HubNoRevision as error:  # a replica that is behind, or a repo made anew
            self._head = None
            raise HubMoved(str(error), "moved on") from error
        except HubError:
            self._head = None  # the head that is read next is believed
            raise

    def _bring(self, upload: Upload) -> None:
        if not self.is_known:
            self._hub.create(self._policy.private)
            if foreign := look_at(self._hub).holds_something_else():
                raise Fenced(foreign_content(self._hub, foreign))
            self.is_known = True
        parent, before = self._parent()
        commits = self._commits + 1
        # What is squashed after this commit must not be counted by the next attempt.
        squashed = self._can_squash and commits >= self._policy.squash_every
        latest = described(upload, self._run_id, self._attempt_id, 0 if squashed else commits)
        if before is None or replace(before, commits=latest.commits) != latest:
            confirm = lambda: self._confirm(parent)  # noqa: E731
            keep = self._policy.keep
            self._head = publish(self._hub, upload, latest, before, keep, parent, confirm)
        else:  # the answer to its commit was lost
            self._head = parent
        self._commits, self._latest, self._may_take = commits, latest, False

    def _confirm(self, parent: str) -> None:
        """Raise HubMoved, or Fenced, where `parent` is no longer the head.

        The server may ignore the parent that a commit names; uploading took a while.
        """
        if self._hub.head()[0] != parent and self._parent()[0] != parent:
            raise HubMoved(f"{self._hub.repo_id} has moved on meanwhile", "moved on")

    def _parent(self) -> tuple[str, Latest | None]:
        """The commit to build on, and its latest.json.

        Raises Fenced when the repo is another's.
        """
        head, private = self._hub.head()
        if self._policy.private and not private:
            raise HubRefused(
                f"{self._hub.repo_id} has become public, and hub.private=true. Make it private, or "
                "start with hub.private=false."
            )
        if head == self._head:
            return head, self._latest
        try:
            found = self._hub.latest(head, self._hub.files(head))
        except SnapshotError:
            found = None  # not what this project writes: nobody's
        ours = {self._attempt_id, *self._ended}
        if not (found is None or found.attempt_id in ours or found == self._seen):
            if not self._may_take:
                raise Fenced(self._whose(found))
            self._seen = found  # whoever reads it later is behind
            return head, found
        if self._head is not None and self._is_older(found):
            return self._head, self._latest  # a read that is behind
        return head, found

    def _is_older(self, found: Latest | None) -> bool:
        """Whether what a read of the head shows is from before our last upload."""
        assert self._latest is not None
        if found is None or found == self._seen or found.attempt_id in self._ended:
            return True
        return found.attempt_id == self._attempt_id and found.step < self._latest.step

    def _whose(self, found: Latest) -> str:
        other = "another run" if found.run_id != self._run_id else "another attempt of this run"
        return (
            f"{other} has uploaded step {found.step} to {self._hub.repo_id}; this one uploads "
            "nothing more. Training goes on, with local snapshots. To take the repo back, start "
            "again with hub.takeover=true; to keep both, give one of them another hub.repo_id."
        )

    def squash_where_due(self, step: int) -> None:
        """Forget the history, after so many commits; a Hub that refuses is not asked again."""
        if not self._can_squash or self._commits < self._policy.squash_every:
            return
        try:
            self._hub.squash(f"Snapshot of step {step}; earlier history forgotten")
            self._commits, self._head = 0, None
        except HubError as error:  # unless it refuses, it stays due
            self._can_squash = not isinstance(error, HubRefused)
            if not self._said_no_squash:
                self._said_no_squash = True
                reason = str(error).rstrip(".")
                self._say(
                    f"the history of {self._hub.repo_id} is not squashed: {reason}. Uploads "
                    "continue, but files of earlier commits still take storage there."
                )
