"""The uploads of one attempt: who owns the repo, which commit to build on, when to squash."""

from __future__ import annotations

from collections.abc import Callable, Collection

from snapshot.disk.files import folder_name
from snapshot.errors import SnapshotError
from store.errors import HubConflict, HubError, HubNoRevision, HubRefused, HubUnsupported
from store.fence import Behind, Fenced
from store.fetch import read_repo
from store.latest import Latest
from store.pruning import Manifests
from store.publish import BestCheck, latest_for, publish
from store.repo import Hub
from store.store import Policy, Transfer, Upload, UploadTarget

STORAGE_IS_FULL = ("HTTP 402", "HTTP 403", "HTTP 413", "HTTP 507")
"""Statuses that servers send where a repo's storage has no room, among other reasons."""


class RepoAttempt:
    """Uploads the snapshots of one attempt, one at a time. Not thread-safe."""

    def __init__(self, hub: Hub, target: UploadTarget, notify: Callable[[str], None]) -> None:
        """`notify` receives sentences for the user."""
        self._hub, self._policy, self._notify = hub, target.policy, notify
        self._run_id, self._attempt_id = target.run_id, target.attempt_id
        self._fence = target.fence
        self.repo_was_read = target.repo_was_read
        self._best_check = BestCheck(notify)
        self._unneeded: frozenset[str] = frozenset()
        """Large files that our last commit removed."""
        self._head: str | None = None
        """Our last commit; None if it is unknown whether it is the newest."""
        self._known = self._latest = target.known_latest
        """The `latest.json` that the start found; and the one of our last commit, once there is."""
        self._commits = 0 if self._latest is None else self._latest.commits
        self._records, self._recorded_step = target.records, 0
        """The step up to which this attempt has uploaded the records."""
        self._manifests = Manifests(hub)
        self._upkeep = Upkeep(self._hub, self._policy, notify)
        self._can_squash, self._made_room = True, False

    def upload(self, upload: Upload) -> Transfer:
        """Upload a snapshot, unless the repo has it; returns what was sent.

        Raises Fenced, Behind, HubError, and SnapshotError and OSError as `publish` does.
        """
        try:
            return self._upload(upload)
        except (Fenced, Behind):
            self._head = None
            raise
        except HubNoRevision as error:  # a replica that lags, or a repo that was created anew
            self._head = None
            raise HubConflict(str(error), "moved on") from error
        except HubError as error:
            self._head = None  # the outcome is unknown: trust the next read of the head
            if not self._makes_room(error, upload.step):
                raise
            return self._upload(upload)

    def _makes_room(self, error: HubError, step: int) -> bool:
        """Squash the history where storage may be full, and only that frees some. At most once.

        Not if it has commits of somebody else, who has not asked for that.
        """
        full = isinstance(error, HubRefused) and error.short in STORAGE_IS_FULL
        if not full or self._upkeep.can_delete or not self._can_squash or self._made_room:
            return False
        self._made_room = True
        try:
            title = self._hub.title_of_other_commit()
        except HubError:
            return False
        if title is not None:
            self._notify(
                f"the storage of {self._hub.repo_id} may be full. Its history is not squashed, "
                f"because it has a commit of somebody else ({title:.80}). hub.squash_every=10 "
                "squashes that, too."
            )
        return title is None and self._squash(step)

    def _upload(self, upload: Upload) -> Transfer:
        if not self.repo_was_read:
            self._hub.create(self._policy.private)
            if refusal := read_repo(self._hub).refusal():
                raise Fenced(refusal)
            self.repo_was_read = True
        parent, before = self._parent(upload.step)
        commits = self._commits_before(before) + 1
        # If this commit is squashed, the next attempt must not count the commits before it.
        counted = 0 if self._is_squash_due(commits) else commits
        upload = self._best_check.checked(upload)
        generation = self._fence.generation
        latest = latest_for(upload, self._run_id, self._attempt_id, generation, counted, before)
        transfer = Transfer()
        if before is not None and before == self._known and before.run_id == self._run_id:
            self._upkeep.tag_milestone(before, parent)  # the attempt before may have been killed
        if not latest.is_same_upload(before):
            records, reached = self._new_records(upload.step)
            done = publish(
                self._hub,
                upload,
                latest,
                before,
                parent=parent,
                keep=self._policy.keep,
                manifests=self._manifests,
                records=records,
                confirm=lambda: self._confirm(parent, upload.step),
            )
            self._head, self._latest = done.commit, latest
            transfer, self._recorded_step = done.transfer, reached
            self._unneeded |= done.unneeded
        else:  # the commit succeeded earlier, and its response was lost
            assert before is not None
            latest = before
            self._head, self._latest = parent, latest
        self._upkeep.tag_milestone(latest, self._head)
        self._commits, self._fence.has_uploaded = commits, True
        return transfer

    def _commits_before(self, before: Latest | None) -> int:
        """The commits since the last squash, as the attempt counts that made the newest."""
        if before is None or before.attempt_id == self._attempt_id:
            return self._commits
        return before.commits

    def _new_records(self, step: int) -> tuple[dict[str, bytes], int]:
        """The records that this attempt has not uploaded yet. They never delay a snapshot."""
        try:
            return self._records(self._recorded_step, step)
        except (OSError, ValueError) as error:
            text = f"metrics are not uploaded: {str(error).rstrip('.')}."
            self._upkeep.report_once("records", text)
            return {}, self._recorded_step

    def _confirm(self, parent: str, step: int) -> None:
        """Raise HubConflict, Fenced or Behind, if `parent` is no longer the head.

        The server may ignore the parent of a commit, and the upload took a while.
        """
        if self._hub.head()[0] != parent and self._parent(step)[0] != parent:
            raise HubConflict(f"{self._hub.repo_id} has moved on meanwhile", "moved on")

    def _parent(self, step: int) -> tuple[str, Latest | None]:
        """The commit to build on with a snapshot of that step, and its `latest.json`.

        Raises Fenced or Behind if another attempt owns the repo.
        """
        head, private = self._hub.head()
        if self._policy.private and not private:
            raise HubRefused(
                f"{self._hub.repo_id} is public now, and hub.private=true. Make it private, or "
                "start with hub.private=false."
            )
        if head == self._head:
            return head, self._latest
        found = self._hub.latest_during_run(head, self._hub.files(head))
        if self._head is not None and self._fence.is_stale(found, self._latest):
            return self._head, self._latest
        self._fence.check(found, step)
        return head, found

    def tidy(self, step: int) -> None:
        """After the upload of a step: free storage that the newest commit does not need.

        Raises nothing.
        """
        self._upkeep.delete_contents(self._unneeded, self._head)
        self._unneeded = frozenset()
        if self._is_squash_due(self._commits):
            self._squash(step)

    def _is_squash_due(self, commits: int) -> bool:
        every = self._policy.squash_every
        return self._can_squash and every is not None and commits >= every

    def _squash(self, step: int) -> bool:
        """Squash the history; if the Hub refuses, never again. Whether it was squashed."""
        try:
            self._hub.squash(f"Snapshot of step {step}; earlier history squashed")
            self._commits, self._head = 0, None
            return True
        except HubError as error:  # unless the Hub refuses, the next upload tries again
            self._can_squash = not isinstance(error, HubRefused)
            self._upkeep.report_once(
                "squash",
                f"the history of {self._hub.repo_id} is not squashed: {error.reason}. Uploads "
                "continue, but files of earlier commits still use storage there.",
                error,
            )
            return False


class Upkeep:
    """Tags milestones, and deletes the contents of pruned snapshots from the repo's storage.

    Nothing that a tag, another branch or a pull request holds is deleted. Not thread-safe.
    """

    def __init__(self, hub: Hub, policy: Policy, notify: Callable[[str], None]) -> None:
        """`notify` receives sentences for the user."""
        self._hub, self._policy, self._notify = hub, policy, notify
        self._untagged: dict[str, tuple[str, Latest]] = {}
        """By tag, the commit and the snapshot that it is for."""
        self._unneeded: set[str] = set()
        self._held: dict[str, frozenset[str]] = {}
        """By commit of the head or of a ref, the contents that it holds."""
        self.can_delete = policy.squash_every is None
        """Whether contents can be deleted one by one; a history that is squashed frees them all."""
        self._reported: set[str] = set()

    def tag_milestone(self, latest: Latest, commit: str) -> None:
        """Tag a commit, if its newest snapshot is a milestone.

        Raises HubError if a retry may succeed. A refusal is reported once, and the tag is tried
        again with the next milestone.
        """
        if not self._policy.is_milestone(latest.step):
            return
        self._untagged[folder_name(latest.step)] = (commit, latest)
        try:
            tags = self._hub.refs()
            for name, (target, snapshot) in list(self._untagged.items()):
                self._tag(name, target, snapshot, tags.get(f"tags/{name}"))
                del self._untagged[name]
        except HubRefused as error:
            names = ", ".join(self._untagged)
            text = f"{names} of {self._hub.repo_id} has no tag yet: {error.reason}."
            self.report_once("tag", text, error)

    def _tag(self, name: str, target: str, snapshot: Latest, found: str | None) -> None:
        """Tag a commit, unless a commit with the same snapshot has that tag, or somebody's commit.

        A tag of ours leads to a commit whose newest snapshot has that step.
        """
        if found is not None:
            try:
                tagged = self._hub.latest(found, self._hub.files(found))
            except SnapshotError:
                tagged = None
            if tagged is None or tagged.step != snapshot.step:
                self.report_once(
                    name,
                    f"{self._hub.repo_id} already has a tag {name}, on a commit that is not of "
                    f"step {snapshot.step}. The tag is left there, so the snapshot of that step "
                    "is no milestone, and hub.keep decides when it is pruned.",
                )
                return
            if tagged.manifest_sha256 == snapshot.manifest_sha256:
                return
        self._hub.tag(name, target, replace=found is not None)

    def delete_contents(self, unneeded: Collection[str], head: str | None) -> None:
        """Delete large files, by their SHA-256, that `head`, the newest commit, no longer has.

        Raises nothing: what fails is tried again with the next call, unless the Hub refuses.
        """
        if not self.can_delete:
            return
        self._unneeded |= set(unneeded)
        try:
            if self._unneeded and self._hub.head()[0] == head:  # or another attempt may need them
                self._unneeded -= self._held_by({*self._hub.refs().values(), head})
                if self._unneeded:
                    self._hub.delete_contents(self._unneeded)
            self._unneeded.clear()
        except HubError as error:
            self.can_delete = not isinstance(error, HubRefused)
            left = f"files of pruned snapshots still use storage of {self._hub.repo_id}"
            if self.can_delete:
                text = f"{left}: {error.reason}. The next upload of this run tries again."
                self.report_once("delete later", text)
            else:
                self.report_once(
                    "delete",
                    f"{left}, because they cannot be deleted one by one: {error.reason}. Uploads "
                    "continue; hub.squash_every=10 frees it where the server can squash.",
                    error,
                )

    def _held_by(self, commits: set[str]) -> frozenset[str]:
        """The large files of commits; what an earlier call could not delete may be back in one."""
        held = {one: found for one, found in self._held.items() if one in commits}
        for commit in commits - set(held):
            files = self._hub.files(commit).values()
            held[commit] = frozenset(one.sha256 for one in files if one.sha256 is not None)
        self._held = held
        return frozenset().union(*held.values())

    def report_once(self, kind: str, text: str, error: HubError | None = None) -> None:
        """Tell the user once in an attempt, and once in a run what the server cannot do."""
        if kind not in self._reported:
            self._reported.add(kind)
            (self._hub.note if isinstance(error, HubUnsupported) else self._notify)(text)
