"""Several attempts of a run on one store: the one of the highest generation owns it.

A state machine drives two to three attempts through both kinds of store, in memory. The others
upload to a loopback Hub, or are whole trainings.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import hubs
import runs
from in_memory import FAULTS, KINDS, Fault, Killed, Shared
from paced import paced, read_until
from snapshot.disk.folder import MANIFEST, MANIFEST_FORMAT, folder_name
from snapshot.disk.state import FORMAT_VERSION, STATE, RunState
from store.attempt import Attempt, Card, Upload, UploadTarget
from store.errors import StoreError
from store.fence import Fence, Fenced
from store.fetch import read_store
from store.latest import LATEST, Latest, folders_in, remote_step
from store.store import Store

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"  # huggingface_hub 2.4 calls httpx2 so
)
KEEP, MILESTONE = 2, 40
FOREIGN_IN_FILES = {"snapshots/step-00000010-cafecafe/model.safetensors": b"no manifest"}
FOREIGN = {"notes.txt": b"mine", "snapshots/notes.txt": b"mine", **FOREIGN_IN_FILES}


@dataclass
class Trainer:
    """One attempt: it trains on, uploads its newest snapshot, and may die."""

    name: str
    client: Store
    attempt: Attempt
    step: int
    was_read: bool
    generation: int
    """What it should write; 0 where the start could not read the store."""
    pending: Upload | None = None
    living: bool = True
    is_fenced: bool = False

    @property
    def uploads(self) -> bool:
        return self.living and not self.is_fenced


class Attempts(RuleBasedStateMachine):
    """Attempts of one run, their faults, and what must hold after each of them."""

    kind = "repo"

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.shared = Shared(on_delete=self.check_deletion)
        self.trainers: list[Trainer] = []
        self.foreign: dict[str, bytes] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    # What happens.

    @precondition(lambda self: sum(one.living for one in self.trainers) < 3)
    @rule(reads=st.sampled_from(["now", "now", "now", "stale", "nothing"]), own=st.integers(0, 9))
    def start(self, reads: str, own: int) -> None:
        """An attempt begins at what it reads; where it reads nothing, at a step of its disk."""
        name = f"{len(self.trainers):032x}"[::-1]
        client = KINDS[self.kind](self.shared, name)
        client.begin(Fault("stale", 1) if reads == "stale" else None)
        repo = None if reads == "nothing" else read_store(client)
        known = None if repo is None else repo.latest
        step = 10 * own if repo is None else 0 if known is None else known.step
        policy = (KEEP, True, False, 0.0, MILESTONE)
        target = UploadTarget(client, "run", name, *policy, known, was_read=repo is not None)
        attempt = Attempt(target)
        generation = 0 if repo is None else 1 + (0 if known is None else known.generation)
        if reads == "now" and self.shared.written:
            # So the later of two starts owns the run.
            assert generation > max(latest.generation for latest, _ in self.shared.written)
        self.trainers.append(Trainer(name, client, attempt, step, repo is not None, generation))

    @precondition(lambda self: any(one.uploads for one in self.trainers))
    @rule(
        who=st.integers(0, 9),
        again=st.booleans(),
        fault=st.sampled_from([None, None, *FAULTS]),
        at=st.integers(1, 30),
        other=st.integers(0, 9),
    )
    def upload(self, who: int, again: bool, fault: str | None, at: int, other: int) -> None:
        """A snapshot of the next step, or the one that failed, with a fault at some request."""
        living = [one for one in self.trainers if one.uploads]
        one, another = living[who % len(living)], living[other % len(living)]
        then = (lambda: None) if another is one else (lambda: self.uploaded(another, False, None))
        self.uploaded(one, again, None if fault is None else Fault(fault, at, then))

    def uploaded(self, one: Trainer, again: bool, fault: Fault | None) -> None:
        if one.pending is None or not again:
            one.step += 10
            one.pending = Upload(self.snapshot(one), Card("# card\n"))
        one.client.begin(fault)
        try:
            one.attempt.upload(one.pending)
            one.pending = None
        except Fenced:
            one.is_fenced = True
        except StoreError:
            pass  # tried again
        except Killed:
            one.living = False

    def snapshot(self, one: Trainer) -> Path:
        """What an upload takes for a snapshot: no file of it is another one's."""
        folder = self.root / one.name / folder_name(one.step)
        folder.mkdir(parents=True)
        state = asdict(RunState("run", one.name, one.step, 0, 1, None, {}, {}))
        files = {
            "config.json": json.dumps({"step": one.step, "by": one.name}).encode(),
            STATE: json.dumps({"format_version": FORMAT_VERSION, **state}).encode(),
        }
        entries = [
            {"path": path, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for path, content in files.items()
        ]
        manifest = {"format": MANIFEST_FORMAT, "files": entries}
        for path, content in {**files, MANIFEST: json.dumps(manifest).encode()}.items():
            (folder / path).write_bytes(content)
        return folder

    @precondition(lambda self: any(one.living for one in self.trainers))
    @rule(who=st.integers(0, 9))
    def kill(self, who: int) -> None:
        living = [one for one in self.trainers if one.living]
        living[who % len(living)].living = False

    @precondition(lambda self: LATEST in self.shared.now)
    @rule(path=st.sampled_from(sorted(FOREIGN)))
    def put_foreign_file(self, path: str) -> None:
        """Somebody adds a file, in a store of files to the folder of a snapshot."""
        if self.kind == "files" and path not in FOREIGN_IN_FILES:
            path = f"{folders_in(self.shared.now)[0]}/notes.txt"
        self.foreign[path] = content = FOREIGN.get(path, b"mine")
        self.shared.change("somebody", {path: content}, set(), False)

    @precondition(lambda self: any(one.uploads for one in self.trainers))
    @rule(first=st.integers(0, 9))
    def settle(self, first: int) -> None:
        """Without faults, at most one attempt is left that uploads, and it owns the run.

        Two uploads of each decide: with its second, an attempt finds that it is fenced.
        """
        living = [one for one in self.trainers if one.uploads]
        for one in 2 * (living[first % len(living) :] + living[: first % len(living)]):
            if one.uploads:
                self.uploaded(one, True, None)
        left = [one for one in living if one.uploads]
        assert len(left) <= 1
        newest, written = self.newest(), [latest for latest, _ in self.shared.written]
        assert newest.generation == max(latest.generation for latest in written)
        if left:
            assert newest.attempt_id == left[0].name
        for one in living:  # the others were before it, as far as generations tell
            assert one.uploads or newest.generation >= one.attempt.fence.generation

    # What must hold.

    def newest(self):
        """latest.json as the next start reads it, by the shipped code."""
        return read_store(KINDS[self.kind](self.shared, "")).latest

    @invariant()
    def the_newest_step_of_the_highest_generation_is_found(self) -> None:
        """Except where two attempts wrote at once to a store of files: until the owner's next."""
        if not self.shared.written:
            return
        last, disturbed = self.shared.written[-1]
        highest = max(latest.generation for latest, _ in self.shared.written)
        if last.generation < highest:
            assert self.kind == "files"
            assert disturbed
            return
        mine = [one for one, _ in self.shared.written if one.attempt_id == last.attempt_id]
        assert last.step == max(one.step for one in mine)
        repo = read_store(KINDS[self.kind](self.shared, ""))
        assert repo.latest == last
        found = repo.folders()[0]
        assert found == last.folder
        manifest = self.shared.now[f"{found}/{MANIFEST}"]
        assert hashlib.sha256(manifest).hexdigest() == last.manifest_sha256

    @invariant()
    def every_snapshot_is_whole(self) -> None:
        for folder in self.shared.whole():
            for entry in json.loads(self.shared.now[f"{folder}/{MANIFEST}"])["files"]:
                content = self.shared.now[f"{folder}/{entry['path']}"]
                assert hashlib.sha256(content).hexdigest() == entry["sha256"]

    @invariant()
    def nothing_foreign_is_touched(self) -> None:
        assert {path: self.shared.now.get(path) for path in self.foreign} == self.foreign

    def check_deletion(self, attempt: str, before: dict[str, bytes], paths: set[str]) -> None:
        """An attempt deletes whole snapshots only beyond the newest ones up to its own step."""
        gone = {path.rpartition("/")[0] for path in paths if path.endswith(f"/{MANIFEST}")}
        (one,) = [trainer for trainer in self.trainers if trainer.name == attempt]
        up_to = [folder for folder in folders_in(before) if remote_step(folder) <= one.step]
        # In a repo the commit that deletes is also the one that adds the newest.
        keep = KEEP - (self.kind == "repo")
        for folder in gone:
            assert folder in up_to[keep:], (folder, up_to)
            assert remote_step(folder) % MILESTONE


class OnRepo(Attempts):
    kind = "repo"


class OnFiles(Attempts):
    kind = "files"


@pytest.mark.parametrize("machine", [OnRepo, OnFiles], ids=["repo", "files"])
@pytest.mark.parametrize(
    "examples", [15, pytest.param(250, marks=pytest.mark.thorough)], ids=["some", "thorough"]
)
def test_attempts_in_any_order_with_any_faults(machine, examples):
    """500 examples over both kinds of store with `-m thorough`, 30 without."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=examples < 100,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def found(generation: int, attempt: str = "other", run: str = "run", step: int = 10) -> Latest:
    folder = f"snapshots/step-{step:08d}-{attempt[:8]}"
    return Latest(run, attempt, generation, step, folder, "0" * 64)


def test_the_rule_of_the_fence():
    fence = Fence("me/run", "run", "mine", takes_over=False, generation=4)
    fence.check(found(3, step=90), 20)  # the last upload of an attempt that is replaced
    assert fence.generation == 4
    fence.check(found(4), 20)  # another start read the same, and may have died since
    assert fence.generation == 5
    fence.check(found(5, "mine"), 20)  # the answer was lost
    fence.has_uploaded = True
    fence.check(found(4), 30)
    with pytest.raises(Fenced, match="another start of this run uploads to me/run now"):
        fence.check(found(5), 30)
    with pytest.raises(Fenced, match="another run has uploaded step 10 to me/run"):
        fence.check(found(1, run="another"), 30)
    # A start that could not read the store never replaces later steps.
    fence = Fence("me/run", "run", "mine", takes_over=False, generation=0)
    with pytest.raises(Fenced, match="which this start could not read"):
        fence.check(found(3, step=1000), 30)
    fence.check(found(3, step=1000), 1000)
    assert fence.generation == 4
    # A takeover lasts until the first upload.
    fence = Fence("me/run", "run", "mine", takes_over=True, generation=8)
    fence.check(found(9, run="another"), 10)
    assert fence.generation == 10
    fence.has_uploaded = True
    with pytest.raises(Fenced, match=r"start again with hub\.takeover=true"):
        fence.check(found(11, run="another"), 10)


@pytest.mark.thorough
def test_of_two_living_attempts_the_later_owns_and_the_earlier_trains_on(small, tmp_path, hub):
    """The earlier one stands still until the later one has uploaded: nobody reads what it says."""
    words = [*small, "model.dropout=0.1", "train.eval_every=1000", "run.name=run"]
    words += ["train.max_steps=120", "snapshot.every=10"]
    first, second = (
        runs.command(*words, *hubs.words(tmp_path / name)) for name in ("first", "second")
    )
    with paced(first, **hub.environment()) as (one, lines):
        said = "".join(read_until(lines, "step 1/"))
        hub.wait_for(lambda: hubs.step_of(hub))
        with runs.started(second, into=tmp_path / "of later", **hub.environment()) as other:
            hub.wait_for(lambda: hubs.latest(hub)["generation"] == 2, runs.DEADLINE_SECONDS)
            said += "".join(lines)
            assert one.wait(runs.DEADLINE_SECONDS) == other.wait(runs.DEADLINE_SECONDS) == 0
    of_later = (tmp_path / "of later").read_text()
    assert said.count("another start of this run uploads to me/run now") == 1
    assert "me/run lacks the end of this run: uploads have stopped, see above" in said
    assert "this one stops uploading" not in of_later
    assert "hub       me/run has step 120" in of_later
    by_attempt = [one["attempt_id"] for one in hubs.all_latest(hub)]
    assert by_attempt == sorted(by_attempt, key=by_attempt.index)  # none of them twice
    assert (hubs.latest(hub)["generation"], hubs.step_of(hub)) == (2, 120)
    runs.assert_same_bits(*(runs.snapshot(tmp_path / name, 120) for name in ("first", "second")))
    hubs.assert_always_whole(hub)
