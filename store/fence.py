"""Which of several attempts may upload to a store: the one of the highest generation.

A start reads generation g in `latest.json`, and its first upload writes g + 1. So the later start
owns the run, and an earlier one that still lives finds a higher generation and stops for good. Of
two starts that read the same generation, the second that uploads owns the run: the first may have
died since, and its last upload must not fence the one that replaces it. No clock is involved, and
nothing waits. docs/hub.md states the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from store.latest import Latest


class Fenced(Exception):
    """Another attempt, or another run, uploads to the store. The message is a sentence."""


@dataclass
class Fence:
    """Whether an attempt may replace the `latest.json` that it finds. Not thread-safe."""

    store: str
    """Its name, for messages."""
    run_id: str
    attempt_id: str
    takes_over: bool
    """`hub.takeover`: whether the first upload may replace another run."""
    generation: int
    """Of this attempt; 0 until it has read the store."""
    has_uploaded: bool = False

    def check(self, current: Latest | None, step: int) -> None:
        """Raise Fenced unless this attempt may upload a snapshot of `step` now."""
        if current is None:
            self.generation = max(self.generation, 1)
            return
        if current.attempt_id == self.attempt_id:
            return
        is_first = not self.has_uploaded
        there = f"has uploaded step {current.step} to {self.store}"
        stays = "Training continues with local snapshots."
        if current.run_id != self.run_id:
            if not (is_first and self.takes_over):
                raise Fenced(
                    f"another run {there}; this one stops uploading. {stays} To take the store "
                    "back, start again with hub.takeover=true; to keep both runs, give one of them "
                    "another store."
                )
        elif not self.generation and current.step > step:
            raise Fenced(
                f"another attempt of this run {there}, which this start could not read; this one "
                f"uploads nothing. {stays} To continue from that step, start again."
            )
        elif 0 < self.generation < current.generation + (not is_first):
            raise Fenced(
                f"another start of this run uploads to {self.store} now, and has uploaded step "
                f"{current.step}; this one stops uploading. {stays}"
            )
        self.generation = max(self.generation, current.generation + 1)

    def is_stale(self, current: Latest | None, uploaded: Latest | None) -> bool:
        """Whether a read shows a state from before this attempt's last upload, if there is one."""
        if uploaded is None:
            return False
        if current is None or current.generation < self.generation:
            return True
        return current.attempt_id == self.attempt_id and current.step < uploaded.step
