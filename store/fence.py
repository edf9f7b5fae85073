"""Which of several attempts may upload to a store: the one of the highest generation.

A start reads generation g in `latest.json`, and its first upload writes g + 1. So the later start
owns the run, and an earlier one that still lives finds a higher generation and stops for good. Of
two starts that read the same generation, the second that uploads owns the run: the first may have
died since, and its last upload must not fence the one that replaces it. No clock is involved, and
nothing waits. docs/hub.md states the rule.
"""

from __future__ import annotations

from store.latest import Latest


class Fenced(Exception):
    """Another attempt, or another run, uploads to the store. The message is a sentence."""


class Behind(Exception):
    """The store has a later step than a start that could not read it. The message is a sentence."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step
        """The newest step in the store."""


class Fence:
    """Whether an attempt may replace the `latest.json` that it finds. Not thread-safe."""

    def __init__(
        self,
        store: str,
        run_id: str,
        attempt_id: str,
        known: Latest | None,
        was_read: bool,
        takes_over: bool,
    ) -> None:
        """`known` is what the start found; `takes_over` is `hub.takeover`."""
        self._store, self._run_id, self._attempt_id = store, run_id, attempt_id
        self._takes_over = takes_over
        self.generation = _generation(known) + 1 if was_read else 0
        """Of this attempt; 0 until it has read the store."""
        self.has_uploaded = False

    def check(self, found: Latest | None, step: int) -> None:
        """Raise Fenced or Behind unless this attempt may upload a snapshot of `step` now."""
        if found is not None and found.attempt_id == self._attempt_id:
            return
        if found is not None and found.run_id != self._run_id:
            if self.has_uploaded or not self._takes_over:
                raise Fenced(
                    f"another run has uploaded step {found.step} to {self._store}; this one stops "
                    "uploading. Training continues with local snapshots. To take the store back, "
                    "start again with hub.takeover=true; to keep both runs, give one of them "
                    "another store."
                )
            self.generation = max(self.generation, found.generation + 1)
        elif not self.generation:
            if found is not None and found.step > step:
                raise Behind(
                    f"another attempt of this run has uploaded step {found.step} to {self._store}, "
                    "which this start could not read. Uploads begin after that step; to continue "
                    "from it, start again",
                    found.step,
                )
            self.generation = _generation(found) + 1
        elif found is not None and found.generation >= self.generation:
            if found.generation == self.generation and not self.has_uploaded:
                self.generation += 1
                return
            raise Fenced(
                f"another start of this run uploads to {self._store} now, and has uploaded step "
                f"{found.step}; this one stops uploading. Training continues with local snapshots."
            )

    def is_stale(self, found: Latest | None, uploaded: Latest | None) -> bool:
        """Whether a read shows a state from before this attempt's last upload, if there is one."""
        if uploaded is None:
            return False
        if found is None or found.generation < self.generation:
            return True
        return found.attempt_id == self._attempt_id and found.step < uploaded.step


def _generation(latest: Latest | None) -> int:
    return 0 if latest is None else latest.generation
