"""What follows a commit: the tag of a milestone, and storage that nothing needs any more."""

from __future__ import annotations

from collections.abc import Callable, Collection

from snapshot.disk.files import folder_name
from snapshot.errors import SnapshotError
from store.client import Hub
from store.errors import HubError, HubRefused, HubUnsupported
from store.latest import Latest
from store.remote import Policy


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
            self._report_once("tag", text, error)

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
                self._report_once(
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
                self._report_once("delete later", text)
            else:
                self._report_once(
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

    def _report_once(self, kind: str, text: str, error: HubError | None = None) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            (self._hub.note if isinstance(error, HubUnsupported) else self._notify)(text)
