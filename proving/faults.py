"""Faults on request: the store is gone, the disk is full, a process is slow, one is killed."""

from __future__ import annotations

from collections.abc import Iterator

from config.schema import Config
from proving import folders
from proving.attempts import Launch
from proving.ends import same_losses
from proving.lines import Line, failed, passed, unchecked
from proving.stores import Scratch
from proving.task import (
    DISK_FULL,
    FULL_AT,
    GONE_SECONDS,
    HUB_GONE,
    IN_STEP,
    SLOW,
    Outcome,
    Task,
)
from snapshot.errors import SnapshotError
from store.errors import HubError
from training.exits import EXIT_DONE


def faults(launch: Launch, config: Config, whole: Outcome, steps: int) -> Iterator[Line]:
    """Each fault, and the same run in spite of it."""
    yield store_gone(launch, config, steps)
    yield from disk_full(launch, whole, steps)
    yield slow(launch, whole, steps)
    yield from restarted(launch, whole, steps)


def store_gone(launch: Launch, config: Config, steps: int) -> Line:
    """A store that does not answer for a while: training goes on, and the upload comes later."""
    name = "store gone"
    if config.hub.store_url is None:
        return unchecked(name, "there is no store")
    try:
        with Scratch(config) as scratch:
            found = launch.run(Task("gone", "gone", steps, scratch.changes, fault=HUB_GONE))
            if found.code != EXIT_DONE:
                return failed(name, found)
            newest = scratch.newest_step()
    except (HubError, SnapshotError) as error:
        return passed(name, False, f"{error}")
    said = f"for {GONE_SECONDS} s; training went on, and it has step {newest} in the end"
    return passed(name, newest == steps, said)


def disk_full(launch: Launch, whole: Outcome, steps: int) -> Iterator[Line]:
    """A disk that is full for one snapshot, which is lost; the run is not."""
    name = "disk full"
    found = launch.run(Task("full", "full", steps, {"snapshot.keep": steps}, fault=DISK_FULL))
    if found.code != EXIT_DONE:
        yield failed(name, found)
        return
    lost = not found.snapshot(FULL_AT).exists()
    later = found.snapshot(steps).exists()
    said = f"it costs the snapshot of step {FULL_AT}" if lost else "the attempt noticed nothing"
    yield passed(name, lost and later, f"{said}; that of step {steps} is there")
    yield same_losses("same losses, disk full", whole, found, f"{steps} steps")


def slow(launch: Launch, whole: Outcome, steps: int) -> Line:
    """A process that is slower than the others: they wait for it, and nothing else changes."""
    name = "slow process"
    if launch.processes == 1:
        return unchecked(name, "one process was launched")
    found = launch.run(Task("slow", "slow", steps, fault=SLOW))
    if found.code != EXIT_DONE:
        return failed(name, found)
    return same_losses(name, whole, found, f"{steps} steps, the last process a second late in each")


def restarted(launch: Launch, whole: Outcome, steps: int) -> Iterator[Line]:
    """A process that is killed under a launcher with --max_restarts: no command by hand."""
    name = "restarted by the launcher"
    if (
        found := launch.run_restarted(Task("again", "again", steps, dies_in=IN_STEP, at=2))
    ) is None:
        yield unchecked(name, "the launch has several machines")
        return
    if found.code != EXIT_DONE:
        yield failed(name, found)
        return
    yield same_losses(name, whole, found, f"{steps} steps, killed in step 2 and started again")
    said = f"after step {steps}, against an undisturbed attempt"
    yield folders.same_bits(
        "same bits, restarted", whole.snapshot(steps), found.snapshot(steps), said
    )
