"""Runs with hub.standby on one repo: the owner is killed, paused, stopped or done, and the standby
trains, ends or waits, as docs/hub.md says. No attempt commits once another one has.
"""

from __future__ import annotations

import itertools
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import hubs
import runs
from loopback_hub import LoopbackHub

STEPS = 3000
SILENCE = 10
WAITS, TAKES = "standby   me/run is owned by", "standby   takes over from"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def overrides(small: list[str], run_dir: Path, *more: str) -> list[str]:
    return [
        *small,
        *hubs.words(run_dir),
        f"train.max_steps={STEPS}",
        "train.eval_every=1000",
        "snapshot.every=20",
        "snapshot.keep=2",
        "hub.keep=2",
        "hub.standby=true",
        f"hub.silence_seconds={SILENCE}",
        *more,
    ]


class Machine:
    """A start of the same command with an empty disk."""

    def __init__(self, stack: ExitStack, hub: LoopbackHub, words: list[str], folder: Path) -> None:
        """`words` may have {run_dir}."""
        self.run_dir, self._said = folder / "run", folder / "said"
        folder.mkdir()
        given = [word.format(run_dir=self.run_dir) for word in words]
        started = runs.started(given, into=self._said, session=True, **hub.environment())
        self.process = stack.enter_context(started)

    @property
    def said(self) -> str:
        return self._said.read_text()

    def has_said(self, text: str) -> bool:
        return text in self.said

    def wait_for(self, text: str) -> None:
        try:
            runs.wait_until(lambda: self.has_said(text), self.process)
        except AssertionError:
            raise AssertionError(self.said) from None

    def trains(self) -> bool:
        return self.has_said("\nstep ")

    def ends(self, seconds: float = 120) -> int:
        return self.process.wait(seconds)


class Machines:
    """Starts machines, each with a folder of its own."""

    def __init__(self, stack: ExitStack, hub: LoopbackHub, words: list[str], root: Path) -> None:
        self._stack, self._hub, self._words, self._root = stack, hub, words, root
        self._count = itertools.count(1)

    def start(self, words: list[str] | None = None) -> Machine:
        folder = self._root / f"machine-{next(self._count)}"
        return Machine(self._stack, self._hub, words or self._words, folder)


@pytest.fixture
def machines(small, hub, tmp_path):
    """Machines whose steps take 0.15 s."""
    script = "tests/support/slow_steps.py"
    words = runs.command("0.15", *overrides(small, Path("{run_dir}")), script=script)
    with ExitStack() as stack:
        yield Machines(stack, hub, words, tmp_path)


def attempts_in_order(hub: LoopbackHub) -> list[str]:
    """The attempts that committed, each time that it was another one than before."""
    names = [one["attempt_id"] for one in hubs.all_latest(hub)]
    return [name for name, _ in itertools.groupby(names)]


def assert_never_two_writers(hub: LoopbackHub) -> None:
    order = attempts_in_order(hub)
    assert len(order) == len(set(order)), order
    hubs.assert_always_whole(hub)


Moment = Callable[[LoopbackHub, Machine], Callable[[], object]]


def in_a_step(steps: int) -> Moment:
    def moment(hub: LoopbackHub, owner: Machine) -> Callable[[], object]:
        return lambda: owner.said.count("\nstep ") > steps

    return moment


def in_a_snapshot(hub: LoopbackHub, owner: Machine) -> Callable[[], object]:
    root = owner.run_dir / "snapshots"
    return lambda: owner.trains() and [*root.glob(".tmp-step*")]


def after_a_rename(hub: LoopbackHub, owner: Machine) -> Callable[[], object]:
    root = owner.run_dir / "snapshots"
    runs.wait_until(owner.trains, owner.process)
    before = {*root.glob("step-*")}
    return lambda: {*root.glob("step-*")} - before


def at_a_request(endpoint: str, kind: str = "hang") -> Moment:
    """Once it trains, in an upload or a sign of life."""

    def moment(hub: LoopbackHub, owner: Machine) -> Callable[[], object]:
        runs.wait_until(owner.trains, owner.process)
        fault = hub.fault(endpoint, kind)
        return lambda: fault.hits

    return moment


def at_its_takeover(hub: LoopbackHub, owner: Machine) -> Callable[[], object]:
    return lambda: owner.has_said(TAKES)


def in_its_download(hub: LoopbackHub, owner: Machine) -> Callable[[], object]:
    fault = hub.fault("xorb-get", "hang")
    return lambda: fault.hits


def in_its_last_upload(hub: LoopbackHub, owner: Machine) -> Callable[[], object]:
    runs.wait_until(owner.trains, owner.process)
    owner.process.send_signal(signal.SIGUSR1)
    return lambda: owner.has_said("hub       uploading to")


MOMENTS: dict[str, Moment] = {
    "before its first snapshot": in_a_step(1),
    "in a step": in_a_step(33),
    "while it writes a snapshot": in_a_snapshot,
    "when it has written one": after_a_rename,
    "in an upload, before the contents": at_a_request("preupload"),
    "in an upload, before the commit": at_a_request("commit"),
    "in an upload, the commit applied": at_a_request("commit", "lost-answer"),
    "as it takes over": at_its_takeover,
    "in the download of its start": in_its_download,
    "in a sign of life": at_a_request("tag"),
    "in a step, later": in_a_step(57),
    "in its last upload": in_its_last_upload,
}
EARLY = (at_its_takeover, in_its_download)
"""Moments before it trains, so that no time until it trains is measured for the kill before."""


def test_killed_at_ten_moments_the_standby_trains_and_nobody_else_writes(
    machines, small, hub, tmp_path
):
    undisturbed = tmp_path / "undisturbed"
    whole = runs.train(
        *overrides(small, undisturbed, "hub.standby=false", "hub.repo_id=null"),
        **hub.environment(),
    )
    assert whole.returncode == 0, whole.stderr
    owner, owned, trained, killed = machines.start(), {}, {}, 0
    runs.wait_until(owner.trains, owner.process)  # or the other one might be the first
    names, reached = [*MOMENTS], None
    for name, later in itertools.zip_longest(names, names[1:]):
        standby = machines.start()
        standby.wait_for(WAITS)
        runs.wait_until(reached or MOMENTS[name](hub, owner), owner.process)
        runs.kill_all(owner.process)
        begun, reached = time.monotonic(), None
        hub.clear_faults()
        killed += 1
        if later is not None and MOMENTS[later] is in_its_download:
            reached = in_its_download(hub, standby)  # the next one waits for it while it hangs
        standby.wait_for(TAKES)
        owned[name] = time.monotonic() - begun
        if later is None or MOMENTS[later] not in EARLY:
            runs.wait_until(standby.trains, standby.process)
            trained[name] = time.monotonic() - begun
        owner = standby
    runs.kill_all(owner.process)
    last = machines.start(
        runs.command(*overrides(small, Path("{run_dir}")))
    )  # with steps of full speed
    assert last.ends(600) == 0, last.said
    print("\nkilled | until it owns the run, s | until it trains, s")
    for name, seconds in owned.items():
        print(f"{name} | {seconds:.1f} | {trained.get(name, float('nan')):.1f}")
    for what, found in (("owns", owned), ("trains", trained)):
        times = [*found.values()]
        median, worst = statistics.median(times), max(times)
        print(f"{what}: {len(times)}, median {median:.1f} s, worst {worst:.1f} s")
    assert killed == len(MOMENTS)
    assert len(trained) >= len(MOMENTS) - 2
    assert_never_two_writers(hub)
    assert len(attempts_in_order(hub)) == len(MOMENTS) + 2
    runs.assert_same_bits(runs.snapshot(undisturbed, STEPS), runs.snapshot(last.run_dir, STEPS))
    assert runs.losses(last.run_dir) == runs.losses(undisturbed)


def test_an_owner_that_was_paused_finds_itself_replaced(machines, hub):
    """SIGSTOP, a takeover, SIGCONT: it stops by itself with 75 and commits nothing."""
    owner = machines.start()
    owner.wait_for("step 25/")
    hub.wait_for(lambda: hubs.step_of(hub) >= 20)
    standby = machines.start()
    standby.wait_for(WAITS)
    owner.process.send_signal(signal.SIGSTOP)
    standby.wait_for(TAKES)
    owner.process.send_signal(signal.SIGCONT)
    assert owner.ends() == 75, owner.said
    assert "another attempt, which owns the run now" in owner.said
    runs.wait_until(standby.trains, standby.process)
    assert_never_two_writers(hub)
    assert len(attempts_in_order(hub)) == 2


def test_the_same_in_a_store_of_files(small, hub, tmp_path):
    """The one that took over ends well."""
    place = f"file://{tmp_path}/shared"
    words = overrides(small, Path("{run_dir}"), f"hub.url={place}", "hub.repo_id=null")
    words = [*words, "train.max_steps=400"]
    script = "tests/support/slow_steps.py"

    def manifests() -> list[str]:
        found = (tmp_path / "shared").rglob("*")
        paths = [path.relative_to(tmp_path / "shared").as_posix() for path in found]
        return [path for path in paths if path.endswith("manifest.json")]

    with ExitStack() as stack:
        machines = Machines(stack, hub, runs.command("0.15", *words, script=script), tmp_path)
        owner = machines.start()
        runs.wait_until(manifests, owner.process)
        standby = machines.start()
        standby.wait_for("standby   ")
        owner.process.send_signal(signal.SIGSTOP)
        standby.wait_for(TAKES)
        before = manifests()
        first = {path.split("/")[1] for path in before}
        assert len(first) == 1
        owner.process.send_signal(signal.SIGCONT)
        assert owner.ends() == 75, owner.said
        third = machines.start()
        third.wait_for("standby   ")
        assert standby.ends() == 0, standby.said
        assert third.ends() == 0, third.said
    assert {path for path in manifests() if path.split("/")[1] in first} <= {*before}
    assert any("step-00000400" in path for path in manifests())


def test_signals_end_a_standby_at_once_with_their_codes(machines, hub):
    owner = machines.start()
    hub.wait_for(lambda: hubs.step_of(hub) >= 20)
    standbys = [machines.start() for _ in range(3)]
    codes = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 75}
    for standby, (number, code) in zip(standbys, codes.items(), strict=True):
        standby.wait_for(WAITS)
        begun = time.monotonic()
        standby.process.send_signal(number)
        assert standby.ends(30) == code
        assert time.monotonic() - begun < 10
    assert owner.process.poll() is None
    assert len(attempts_in_order(hub)) == 1


def test_a_standby_takes_over_at_once_from_an_owner_that_hands_over(machines, hub):
    """SIGUSR1: no silence passes. Then Ctrl-C: it was a person, who stops the run everywhere."""
    owner = machines.start()
    hub.wait_for(lambda: hubs.step_of(hub) >= 20)
    standby = machines.start()
    standby.wait_for(WAITS)
    owner.process.send_signal(signal.SIGUSR1)
    assert owner.ends() == 75, owner.said
    begun = time.monotonic()
    standby.wait_for(TAKES)
    assert time.monotonic() - begun < SILENCE / 2
    third = machines.start()
    third.wait_for(WAITS)
    runs.wait_until(standby.trains, standby.process)
    standby.process.send_signal(signal.SIGINT)
    assert standby.ends() == 130, standby.said
    assert third.ends() == 130, third.said
    assert "This standby ends, too" in third.said
    assert_never_two_writers(hub)


def test_a_standby_of_several_processes_waits_longer_than_their_timeouts(small, hub, tmp_path):
    """Only the main process asks; the others agree with it every few seconds. Then the run ends."""
    words = overrides(small, Path("{run_dir}"), "run.start_timeout_seconds=20")
    words = [*words, "run.collective_timeout_seconds=15", "train.max_steps=400"]
    slow = runs.ROOT / "tests" / "support" / "slow_steps.py"
    launch = runs.launch_command("ddp_cpu.yaml", "0.2", *words, script=slow)
    with ExitStack() as stack:
        machines = Machines(stack, hub, launch, tmp_path)
        owner = machines.start()
        hub.wait_for(lambda: hubs.step_of(hub) >= 20)
        standby = machines.start(runs.launch_command("ddp_cpu.yaml", "0.2", *words, script=slow))
        standby.wait_for(WAITS)
        time.sleep(30)
        assert len(runs.workers(standby.process)) == 2
        runs.kill_all(owner.process)
        standby.wait_for(TAKES)
        standby.wait_for("2 processes")
        last = machines.start(runs.launch_command("ddp_cpu.yaml", "0.2", *words, script=slow))
        last.wait_for(WAITS)
        assert standby.ends(600) == 0, standby.said
        assert last.ends() == 0, last.said
        assert "ended: all steps are done" in last.said
    assert_never_two_writers(hub)
