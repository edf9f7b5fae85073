"""Faults the loopback Hub plays, each scripted by endpoint and hit count."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

ENDPOINTS = frozenset(
    {
        *("whoami", "create", "delete", "info", "preupload", "batch", "put"),
        *("verify", "commit", "tree", "paths-info", "resolve-head", "resolve-get", "blob-get"),
        *("refs", "commits", "branch", "tag", "validate-yaml"),
        *("lfs-delete", "bucket-create", "bucket-info", "bucket-tree", "bucket-batch"),
        "bucket-get",
        *("xet-write-token", "xet-read-token", "xet-chunk", "xorb", "shard", "reconstruction"),
        "xorb-get",
    }
)
READS = frozenset({"info", "tree", "paths-info", "resolve-head", "resolve-get", "commits"})
"""Where a stale head shows."""
KINDS: dict[str, frozenset[str]] = {
    "refuse": ENDPOINTS,
    "hang": ENDPOINTS,
    "reset": ENDPOINTS,
    "status": ENDPOINTS,
    "lost-answer": ENDPOINTS,
    "truncated": ENDPOINTS,
    "corrupted": ENDPOINTS,
    "stale-head": READS,
    "ignore-parent": frozenset({"commit"}),
    "parent-500": frozenset({"commit"}),
    "partial": frozenset({"bucket-batch"}),
}
"""Each kind, and the endpoints it can hit.

refuse: the connection is closed at once. hang: no answer ever. reset: the connection is reset after
half of the request's body or, where it has none, after half of the answer's. status: that answer,
and nothing applied. lost-answer: applied, and the connection closed; with `status`, applied and
that answer. truncated: half of the announced body. corrupted: some bytes of the body flipped.
stale-head: main as it was one commit ago. ignore-parent: a commit goes on top of a head that is not
its parent. parent-500: 500 where 412 is due. partial: the second half of a batch is not applied.
"""
MODIFIERS = frozenset({"stale-head", "ignore-parent", "parent-500", "partial"})
"""Kinds that change what is answered, but not whether."""
DETAILS = {"status": {"status", "headers", "message", "code"}, "lost-answer": {"status"}}


@dataclass
class Fault:
    """One scripted fault, and how far it has come."""

    endpoint: str
    kind: str
    after: int = 0
    times: int | None = 1
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = ""
    code: str = ""
    seen: int = 0
    """Requests to the endpoint since the fault was scripted."""
    hits: int = 0
    """Those that it hit."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is none of {sorted(KINDS)}")
        if self.endpoint != "*" and self.endpoint not in KINDS[self.kind]:
            raise ValueError(f"{self.kind} hits * or one of {sorted(KINDS[self.kind])}")
        given = {name for name in ("status", "headers", "message", "code") if getattr(self, name)}
        if unknown := given - DETAILS.get(self.kind, set()):
            raise ValueError(f"{self.kind} takes no {sorted(unknown)}")
        if self.kind == "status" and self.status is None:
            raise ValueError("kind='status' needs a status")

    def meets(self, endpoint: str) -> bool:
        """Count a request; whether the fault hits it."""
        if self.endpoint not in ("*", endpoint) or endpoint not in KINDS[self.kind]:
            return False
        self.seen += 1
        ended = self.times is not None and self.seen > self.after + self.times
        if self.seen <= self.after or ended:
            return False
        self.hits += 1
        return True


class Faults:
    """The scripted faults of a hub. Of several that hit one request, the first scripted is played,
    together with those that only change the answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Script a fault; its count begins now."""
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._faults.clear()

    def take(self, endpoint: str) -> tuple[Fault | None, frozenset[str]]:
        """What hits a request: the fault that is played, and the kinds that change the answer."""
        with self._lock:
            hitting = [fault for fault in self._faults if fault.meets(endpoint)]
        played = [fault for fault in hitting if fault.kind not in MODIFIERS]
        changes = frozenset(fault.kind for fault in hitting if fault.kind in MODIFIERS)
        return (played[0] if played else None), changes
