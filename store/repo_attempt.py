"""The uploads of one attempt to a repo: which commit to build on, and what to free after it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from snapshot.disk.folder import folder_name
from store.errors import NoRevision, StoreError, StoreMoved, StoreRefused, Unsupported
from store.fence import Behind, Fenced
from store.fetch import read_store
from store.hub import Hub
from store.latest import Latest
from store.pruning import Manifests
from store.publish import latest_for, publish
from store.store import Transfer, Upload, UploadTarget


class RepoAttempt:
    """Uploads the snapshots of one attempt, one at a time. Not thread-safe."""

    def __init__(self, hub: Hub, target: UploadTarget, notify: Callable[[str], None]) -> None:
        """`notify` receives sentences for the user."""
        self._hub, self._policy, self._notify = hub, target.policy, notify
        self._run_id, self._attempt_id = target.run_id, target.attempt_id
        self._fence = target.fence
        self.repo_was_read = target.repo_was_read
        self._unneeded: frozenset[str] = frozenset()
        """Large files that our last commit removed."""
        self._head: str | None = None
        """Our last commit; None if it is unknown whether it is the newest."""
        self._latest: Latest | None = None
        """The `latest.json` of our last commit, once there is one."""
        self._records, self._recorded_step = target.records, 0
        """The step up to which this attempt has uploaded the records."""
        self._manifests = Manifests(hub)
        self._upkeep = Upkeep(self._hub, notify)

    def upload(self, upload: Upload) -> Transfer:
        """Upload a snapshot, unless the repo has it; returns what was sent.

        Raises Fenced, Behind, StoreError, and SnapshotError and OSError as `publish` does.
        """
        try:
            return self._upload(upload)
        except (Fenced, Behind):
            self._head = None
            raise
        except NoRevision as error:  # a replica that lags, or a repo that was created anew
            self._head = None
            raise StoreMoved(str(error), "moved on") from error
        except StoreError:
            self._head = None  # the outcome is unknown: trust the next read of the head
            raise

    def _upload(self, upload: Upload) -> Transfer:
        if not self.repo_was_read:
            self._hub.create(self._policy.private)
            if refusal := read_store(self._hub).refusal():
                raise Fenced(refusal)
            self.repo_was_read = True
        parent, before = self._parent(upload.step)
        generation = self._fence.generation
        latest = latest_for(upload, self._run_id, self._attempt_id, generation, before)
        if before is not None and latest.is_same_upload(before):
            # The commit succeeded earlier, and its response was lost.
            self._head, self._latest, transfer = parent, before, Transfer()
        else:
            records, reached = self._new_records(upload.step)
            done = publish(
                self._hub,
                upload,
                latest,
                before,
                parent=parent,
                policy=self._policy,
                manifests=self._manifests,
                records=records,
                confirm=lambda: self._confirm(parent, upload.step),
                report=partial(self._upkeep.report_once, "best"),
            )
            self._head, self._latest = done.commit, latest
            transfer, self._recorded_step = done.transfer, reached
            self._unneeded |= done.unneeded
            if self._policy.is_milestone(latest.step):
                with suppress(StoreError):  # the snapshot stays in any case
                    self._hub.tag(folder_name(latest.step), done.commit)
        self._fence.has_uploaded = True
        return transfer

    def _new_records(self, step: int) -> tuple[dict[str, bytes], int]:
        """The records that this attempt has not uploaded yet. They never delay a snapshot."""
        try:
            return self._records(self._recorded_step, step)
        except (OSError, ValueError) as error:
            text = f"metrics are not uploaded: {str(error).rstrip('.')}."
            self._upkeep.report_once("records", text)
            return {}, self._recorded_step

    def _confirm(self, parent: str, step: int) -> None:
        """Raise StoreMoved, Fenced or Behind, if `parent` is no longer the head.

        The server may ignore the parent of a commit, and the upload took a while.
        """
        if self._hub.head()[0] != parent and self._parent(step)[0] != parent:
            raise StoreMoved(f"{self._hub.repo_id} has moved on meanwhile", "moved on")

    def _parent(self, step: int) -> tuple[str, Latest | None]:
        """The commit to build on with a snapshot of that step, and its `latest.json`.

        Raises Fenced or Behind if another attempt owns the repo.
        """
        head, private = self._hub.head()
        if self._policy.private and not private:
            raise StoreRefused(
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


class Upkeep:
    """Deletes the contents of pruned snapshots from the repo's storage.

    Nothing that a tag, another branch or a pull request holds is deleted. Not thread-safe.
    """

    def __init__(self, hub: Hub, notify: Callable[[str], None]) -> None:
        """`notify` receives sentences for the user."""
        self._hub, self._notify = hub, notify
        self._unneeded: set[str] = set()
        self._held: dict[str, frozenset[str]] = {}
        """By commit of the head or of a ref, the contents that it holds."""
        self._can_delete = True
        """Whether the server deletes contents one by one."""
        self._reported: set[str] = set()

    def delete_contents(self, unneeded: Collection[str], head: str | None) -> None:
        """Delete large files, by their SHA-256, that `head`, the newest commit, no longer has.

        Raises nothing: what fails is tried again with the next call, unless the Hub refuses.
        """
        if not self._can_delete:
            return
        self._unneeded |= set(unneeded)
        try:
            if self._unneeded and self._hub.head()[0] == head:  # or another attempt may need them
                self._unneeded -= self._held_by({*self._hub.refs().values(), head})
                if self._unneeded:
                    self._hub.delete_contents(self._unneeded)
            self._unneeded.clear()
        except StoreError as error:
            self._can_delete = not isinstance(error, StoreRefused)
            left = f"files of pruned snapshots still use storage of {self._hub.repo_id}"
            if self._can_delete:
                text = f"{left}: {error.reason}. The next upload of this run tries again."
                self.report_once("delete later", text)
            else:
                self.report_once(
                    "delete",
                    f"{left}, because they cannot be deleted one by one: {error.reason}. Uploads "
                    "continue; HfApi().super_squash_history(repo) frees it where the server can.",
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

    def report_once(self, kind: str, text: str, error: StoreError | None = None) -> None:
        """Tell the user once in an attempt, and once in a run what the server cannot do."""
        if kind not in self._reported:
            self._reported.add(kind)
            (self._hub.note if isinstance(error, Unsupported) else self._notify)(text)
