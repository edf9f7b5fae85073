"""Promises 2 to 4 with a bucket as the store: no fault, kill or second writer costs a snapshot."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import hubs
import runs
from loopback_buckets import Bucket as LoopbackBucket
from loopback_hub import LoopbackHub
from many_snapshots import copied
from snapshot.disk.files import manifest_sha256
from snapshot.disk.state import read_state
from snapshot.errors import SnapshotError
from snapshot.run_store import RunStore
from snapshot.start import Start, choose_start, newest_of_disk_and_repo
from store.bucket import Bucket
from store.errors import HubRefused
from store.store import Best, Card, Policy, UploadTarget
from store.uploader import Uploader

BUCKET = "me/run"
STEPS = 30
RUN, OTHER_RUN = "1" * 32, "2" * 32
FIRST, SECOND = "a" * 32, "b" * 32


def store(takeover: bool = False) -> RunStore:
    return RunStore(Bucket(BUCKET, 1.0), private=True, takeover=takeover)


def uploader(
    run_id: str = RUN, attempt_id: str = FIRST, *, start: Start | None = None, **more
) -> Uploader:
    """The uploads of an attempt, as often as it can."""
    policy = Policy(keep=3, min_interval=0.0, squash_every=None, private=True, takeover=False)
    keys = ("keep", "takeover", "milestone_every")
    fields = {name: more.pop(name) for name in keys if name in more}
    target = UploadTarget(
        Bucket(BUCKET, 1.0),
        replace(policy, **fields),
        run_id,
        attempt_id,
        repo_was_read=start is None or start.repo is not None,
        **more,
    )
    return Uploader(target)


def upload(uploads: Uploader, *folders: Path, best: Best | None = None) -> None:
    for folder in folders:
        uploads.offer(folder, Card(""), best)
        assert uploads.flush(60), uploads.status()


def started_empty(folder: Path) -> Start:
    return newest_of_disk_and_repo(store(), None, None, folder / "snapshots", ())


def manifests(bucket: LoopbackBucket, run_id: str = "") -> dict[str, int]:
    """The whole snapshots, each with its step."""
    return {
        path.removesuffix("/manifest.json"): int(path.split("/")[2].removeprefix("step-"))
        for path in bucket.files
        if path.endswith("/manifest.json") and path.startswith(run_id)
    }


def steps_in(hub: LoopbackHub, run_id: str = "") -> list[int]:
    bucket = hub.bucket(BUCKET)
    return [] if bucket is None else sorted(manifests(bucket, run_id).values())


def assert_always_whole(hub: LoopbackHub) -> None:
    """After each single operation, a folder with a manifest has all files that this lists."""
    bucket = hub.bucket(BUCKET)
    read: dict[str, list] = {}
    for files in bucket.every_state:
        for path in (path for path in files if path.endswith("/manifest.json")):
            sha256 = files[path].sha256
            if sha256 not in read:
                read[sha256] = json.loads(bucket.contents.path(sha256).read_bytes())["files"]
            for entry in read[sha256]:
                found = files[f"{path.removesuffix('manifest.json')}{entry['path']}"]
                assert (found.size, found.sha256) == (entry["size"], entry["sha256"])


@pytest.fixture
def snapshot_of(finished_run, tmp_path):
    """A whole snapshot of any step, no tensor of which is another's."""

    def of(step: int) -> Path:
        return copied(runs.snapshot(finished_run, 30), tmp_path / "made" / "snapshots", step)

    return of


LIMIT = {"ratelimit": '"api";r=0;t=1', "ratelimit-policy": '"fixed window";"api";q=500;w=300'}
AGES = {"Retry-After": "315360000"}
FAULTS = {
    "connections refused": [("*", "refuse", {"after": 9, "times": 3})],
    "a hang of the first request": [("bucket-info", "hang", {"after": 2})],
    "a hang of the listing": [("bucket-tree", "hang", {"after": 1})],
    "a hang in the contents": [("xorb", "hang", {"after": 1})],
    "a hang of the token for the contents": [("xet-write-token", "hang", {"after": 1})],
    "a hang after the contents": [("shard", "hang", {"after": 1})],
    "a hang of the batch": [("bucket-batch", "hang", {"after": 1})],
    "a reset in the middle of a content": [("xorb", "reset", {"after": 1})],
    "a reset in the middle of the batch": [("bucket-batch", "reset", {"after": 2})],
    "a reset of the listing": [("bucket-tree", "reset", {"after": 1})],
    "the answer to the contents lost": [("xorb", "lost-answer", {}), ("shard", "lost-answer", {})],
    "the answer to a batch lost": [("bucket-batch", "lost-answer", {"times": 2})],
    "the answer to the manifest lost": [("bucket-batch", "lost-answer", {"after": 1})],
    "a batch applied and answered with 500": [("bucket-batch", "lost-answer", {"status": 500})],
    "a batch applied in part": [("bucket-batch", "partial", {"times": 2})],
    "a manifest that is not applied": [("bucket-batch", "partial", {"after": 1})],
    "the storage refuses connections": [("xorb", "refuse", {"times": 3})],
    "500 on the contents": [("xorb", "status", {"status": 500, "times": 8})],
    "503 after the contents": [("shard", "status", {"status": 503, "times": 8})],
    "503 for the storage's token": [("xet-write-token", "status", {"status": 503, "times": 8})],
    "500 on the batch": [("bucket-batch", "status", {"status": 500, "times": 2})],
    "503 on the listing": [("bucket-tree", "status", {"status": 503, "after": 1})],
    "401, the storage's token is not taken": [("xorb", "status", {"status": 401})],
    "401 on the batch": [("bucket-batch", "status", {"status": 401, "after": 1})],
    "403 on the contents": [("xorb", "status", {"status": 403, "after": 1})],
    "403, the storage is full": [("bucket-batch", "status", {"status": 403, "after": 1})],
    "404 on the batch": [("bucket-batch", "status", {"status": 404, "after": 1})],
    "507, the storage is full": [("xorb", "status", {"status": 507, "times": 8})],
    "409, another batch is running": [("bucket-batch", "status", {"status": 409, "times": 2})],
    "429 with a time, on the batch": [
        ("bucket-batch", "status", {"status": 429, "headers": {"Retry-After": "1"}, "times": 2})
    ],
    "429 without a time, on the batch": [("bucket-batch", "status", {"status": 429})],
    "429 on the contents": [("xorb", "status", {"status": 429, "headers": LIMIT})],
    "429 for the storage's token": [
        ("xet-write-token", "status", {"status": 429, "headers": LIMIT})
    ],
    "a wait of ten years asked for": [("xorb", "status", {"status": 429, "headers": AGES})],
}
QUICK = {  # what no repo has; the others are those of a repo, which uploads in the same thread
    "a hang of the batch",
    "a reset in the middle of the batch",
    "the answer to a batch lost",
    "the answer to the manifest lost",
    "a batch applied and answered with 500",
    "a batch applied in part",
    "a manifest that is not applied",
    "403, the storage is full",
    "404 on the batch",
}


LIKE_A_REPO = {  # the storage for large files, which is the same one for both
    name
    for name, faults in FAULTS.items()
    if {endpoint for endpoint, *_ in faults} <= {"xorb", "shard", "xet-write-token"}
}


def marks(name: str) -> list[pytest.MarkDecorator]:
    if name in QUICK:
        return []
    return [pytest.mark.slow if name in LIKE_A_REPO else pytest.mark.thorough]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in FAULTS])
def test_a_fault_costs_no_step_and_no_snapshot(near_hub, finished_run, tmp_path, name):
    faults = [near_hub.fault(endpoint, kind, **more) for endpoint, kind, more in FAULTS[name]]
    begun = started_empty(tmp_path)
    assert begun.folder is None
    uploads = uploader(start=begun)
    steps, hit = [10, 20, 30], lambda: all(fault.hits for fault in faults)
    while steps and not hit():
        newest = steps.pop(0)
        uploads.offer(runs.snapshot(finished_run, newest), Card(""))
        near_hub.wait_for(lambda step=newest: hit() or step in steps_in(near_hub))
    assert uploads.flush(60), uploads.status()
    assert hit()
    assert steps_in(near_hub)[-1] == newest
    for step in steps:
        uploads.offer(runs.snapshot(finished_run, step), Card(""))
    assert uploads.flush(60), uploads.status()
    status = uploads.status()
    assert (status.step, status.failure_text, status.off) == (STEPS, None, False)
    assert steps_in(near_hub)[-1] == STEPS
    assert_always_whole(near_hub)
    assert set(near_hub.uploaded.values()) == {1}
    assert "hf_loopback" not in "".join(uploads.messages())


@pytest.mark.parametrize(
    ("endpoint", "kind"),
    [
        ("xorb-get", "truncated"),
        ("xorb-get", "corrupted"),
        ("xorb-get", "reset"),
        ("xorb-get", "hang"),
        ("bucket-info", "refuse"),
        ("bucket-tree", "reset"),
    ],
)
def test_a_download_that_fails_once_is_made_again(near_hub, finished_run, tmp_path, endpoint, kind):
    run_id = read_state(runs.snapshot(finished_run, 10)).run_id
    near_hub.create_bucket(BUCKET)
    upload(uploader(run_id), runs.snapshot(finished_run, 10))
    fault = near_hub.fault(endpoint, kind)
    begun = started_empty(tmp_path)
    assert fault.hits
    assert begun.state.step == 10
    assert manifest_sha256(begun.folder) == manifest_sha256(runs.snapshot(finished_run, 10))
    assert [path.name for path in begun.folder.parent.iterdir()] == ["step-00000010"]


def test_a_snapshot_that_is_damaged_there_is_passed_over(near_hub, finished_run, tmp_path):
    run_id = read_state(runs.snapshot(finished_run, 10)).run_id
    bucket = near_hub.create_bucket(BUCKET)
    upload(uploader(run_id), *(runs.snapshot(finished_run, step) for step in (10, 20, 30)))
    newest = f"{run_id}/{FIRST}/step-00000030"
    bucket.put(f"{newest}/model.safetensors", None)
    older = bucket.files[f"{run_id}/{FIRST}/step-00000010/optimizer.safetensors"]
    bucket.put(f"{run_id}/{FIRST}/step-00000020/optimizer.safetensors", older)
    begun = started_empty(tmp_path)
    assert begun.state.step == 10
    assert "model.safetensors is missing" in begun.warnings[0]
    assert "optimizer.safetensors has changed" in begun.warnings[1]


@pytest.mark.thorough
def test_old_snapshots_are_deleted_but_milestones_and_the_best(near_hub, snapshot_of):
    bucket = near_hub.create_bucket(BUCKET)
    uploads = uploader(keep=2, milestone_every=4)
    upload(uploads, *map(snapshot_of, range(1, 7)))
    best = snapshot_of(7)
    upload(uploads, best, *map(snapshot_of, (8, 9)), best=Best(7, 1.0, best))
    upload(uploads, *map(snapshot_of, range(10, 12)))
    assert steps_in(near_hub) == [4, 7, 8, 10, 11]
    folders = {path.rpartition("/")[0] for path in bucket.files if "/step-" in path}
    assert len(folders) == 5  # nothing is left of the others
    remote = Bucket(BUCKET, 1.0)
    latest = remote.latest("", remote.files())  # as another machine sees it
    assert (latest.step, latest.best_step, latest.best_loss) == (11, 7, 1.0)
    # That machine has no folder of the best one, which stays all the same.
    upload(uploader(attempt_id=SECOND, keep=1), snapshot_of(12), best=Best(7, 1.0, None))
    assert steps_in(near_hub) == [7, 12]
    assert_always_whole(near_hub)
    assert uploads.messages() == []


@pytest.mark.slow  # promises/hub/test_hub_faults has the same with a repo
def test_a_hundred_snapshots_stay_within_four(near_hub, snapshot_of):
    near_hub.create_bucket(BUCKET)
    uploads = uploader()
    size = sum(path.stat().st_size for path in snapshot_of(1).iterdir())
    most = 0
    for step in range(1, 101):
        folder = snapshot_of(step)
        upload(uploads, folder)
        shutil.rmtree(folder)
        most = max(most, sum(one.size for one in near_hub.bucket(BUCKET).files.values()))
    assert most < 4 * size
    assert steps_in(near_hub) == [98, 99, 100]
    print(f"{most / size:.2f} snapshots at most, the present files of a bucket")


def test_the_best_snapshot_is_uploaded_even_after_newer_ones(near_hub, snapshot_of):
    bucket = near_hub.create_bucket(BUCKET)
    uploads, best = uploader(keep=1), Best(2, 1.0, snapshot_of(2))
    upload(uploads, snapshot_of(1))
    upload(uploads, snapshot_of(3), best=best)  # step 2 was not uploaded: the newest wins
    upload(uploads, *map(snapshot_of, (4, 5)), best=best)
    assert steps_in(near_hub) == [2, 5]
    assert json.loads(bucket.read(f"{RUN}/{FIRST}/best.json")) == {"step": 2, "loss": 1.0}
    # A later attempt that keeps none leaves it there, and the one after still knows it.
    for attempt, steps in ((SECOND, (6, 7)), ("c" * 32, (8,))):
        remote = Bucket(BUCKET, 1.0)
        known = remote.latest("", remote.files())
        assert (known.best_step, known.best_loss) == (2, 1.0)
        upload(uploader(attempt_id=attempt, keep=1, known_latest=known), *map(snapshot_of, steps))
    assert steps_in(near_hub) == [2, 8]
    assert_always_whole(near_hub)


def test_a_best_json_whose_snapshot_a_bucket_has_not_is_ignored(near_hub, snapshot_of, tmp_path):
    """Or the next best one would have to be better than a loss that no snapshot has."""
    near_hub.create_bucket(BUCKET)
    upload(uploader(), snapshot_of(3))
    remote, path = Bucket(BUCKET, 1.0), f"{RUN}/{FIRST}/best.json"
    for step, best in ((2, (0, None)), (3, (3, 1.0))):
        (tmp_path / "best.json").write_text(f'{{"step": {step}, "loss": 1.0}}')
        remote.send({path: tmp_path / "best.json"})
        found = remote.latest("", remote.files())
        assert (found.step, found.best_step, found.best_loss) == (3, *best)


@pytest.mark.thorough
def test_two_writers_damage_nothing_and_the_higher_step_goes_on(near_hub, snapshot_of, tmp_path):
    near_hub.create_bucket(BUCKET)
    near_hub.latency = (0.0, 0.01)
    one, other = uploader(attempt_id=FIRST), uploader(attempt_id=SECOND)
    for step in range(1, 13):
        one.offer(snapshot_of(2 * step), Card(""))
        other.offer(snapshot_of(2 * step + 1), Card(""))
    assert one.flush(60)
    assert other.flush(60)
    assert_always_whole(near_hub)
    assert steps_in(near_hub)[-2:] == [24, 25]
    said = "".join(one.messages() + other.messages())
    assert "another attempt uploads to the bucket me/run" in said
    # A third attempt continues the newest, and deletes what both have left.
    bucket = Bucket(BUCKET, 1.0)
    latest = bucket.latest("", bucket.files())
    assert (latest.attempt_id, latest.step) == (SECOND, 25)
    upload(uploader(attempt_id="c" * 32), *map(snapshot_of, (30, 31, 32)))
    assert steps_in(near_hub) == [30, 31, 32]


def test_what_another_attempt_is_uploading_is_not_deleted(near_hub, snapshot_of):
    bucket = near_hub.create_bucket(BUCKET)
    first = uploader(attempt_id=FIRST, keep=1)
    upload(first, snapshot_of(5))
    slow = near_hub.fault("bucket-batch", "hang", after=1, times=1)
    other = uploader(attempt_id=SECOND, keep=1)
    other.offer(snapshot_of(7), Card(""))  # its contents are there, and its manifest hangs
    near_hub.wait_for(lambda: slow.hits)
    upload(first, *map(snapshot_of, (10, 11, 12)))
    assert f"{RUN}/{SECOND}/step-00000007/model.safetensors" in bucket.files
    assert other.flush(60)
    assert_always_whole(near_hub)
    assert steps_in(near_hub) == [7, 12]


def test_leavings_of_an_attempt_that_is_over_are_deleted(near_hub, snapshot_of):
    bucket = near_hub.create_bucket(BUCKET)
    upload(uploader(attempt_id=FIRST), snapshot_of(5))
    half = bucket.files[f"{RUN}/{FIRST}/step-00000005/model.safetensors"]
    bucket.put(f"{RUN}/{FIRST}/step-00000006/model.safetensors", half)
    next_one = uploader(attempt_id=SECOND, keep=1, ended_attempts=(FIRST,))
    upload(next_one, snapshot_of(10))
    assert {path.rpartition("/")[0] for path in bucket.files} == {f"{RUN}/{SECOND}/step-00000010"}


def test_another_run_needs_a_takeover_and_then_replaces_all(near_hub, snapshot_of, finished_run):
    near_hub.create_bucket(BUCKET)
    upload(uploader(OTHER_RUN), snapshot_of(5))
    newest = runs.snapshot(finished_run, 30)
    with pytest.raises(SnapshotError, match=r"hub\.bucket=me/run holds another run"):
        newest_of_disk_and_repo(store(), newest, read_state(newest), newest.parent, ())
    fenced = uploader(RUN, SECOND)
    fenced.offer(snapshot_of(6), Card(""))
    assert fenced.flush(30)
    assert fenced.status().off
    assert "another run has uploaded step 5 to the bucket me/run" in fenced.messages()[0]
    upload(uploader(RUN, SECOND, takeover=True), snapshot_of(6))
    assert steps_in(near_hub) == [6]


def test_what_cannot_be_a_store_is_refused(near_hub, tmp_path, monkeypatch):
    near_hub.create_bucket("me/public", private=False)
    public = RunStore(Bucket("me/public", 1.0), private=True, takeover=False)
    with pytest.raises(SnapshotError, match=r"hub\.bucket=me/public is a public repo"):
        newest_of_disk_and_repo(public, None, None, tmp_path / "snapshots", ())
    with pytest.raises(HubRefused, match="write under the namespace 'you'"):
        choose_start(tmp_path, "auto", RunStore(Bucket("you/run", 1.0), True, False))
    bucket = near_hub.create_bucket(BUCKET)
    content = Bucket(BUCKET, 1.0)
    (tmp_path / "notes.txt").write_text("mine")
    content.send({"notes.txt": tmp_path / "notes.txt"})
    assert bucket.files
    with pytest.raises(SnapshotError, match=r"hub\.bucket=me/run holds notes\.txt"):
        started_empty(tmp_path)
    monkeypatch.setattr("store.bucket.is_available", lambda: False)
    with pytest.raises(HubRefused, match=r"hub\.bucket needs Xet"):
        content.send({"notes.txt": tmp_path / "notes.txt"})


def words(run_dir: Path, *more: str) -> list[str]:
    mine = [word for word in hubs.words(run_dir, *more) if word != f"hub.repo_id={hubs.REPO}"]
    return ["model.dropout=0.1", "train.eval_every=100", f"hub.bucket={BUCKET}", *mine]


def test_a_run_goes_on_from_its_bucket_on_another_machine(finished_run, small, tmp_path, hub):
    here, there = tmp_path / "here", tmp_path / "there"
    # The later snapshots do not come through before the machine is lost.
    hub.fault("bucket-batch", "hang", after=2, times=None)
    # No request is tried again, which would count as one of the two.
    patient = ["train.max_steps=30", "run.name=run", "hub.timeout_seconds=600"]
    mine = runs.command(*small, *words(here, *patient))
    with runs.started(mine, **hub.environment()):
        hub.wait_for(lambda: 10 in steps_in(hub))
    hub.clear_faults()
    there_before = manifests(hub.bucket(BUCKET))
    shutil.rmtree(here)
    both = words(there, "train.max_steps=30", "run.name=run")
    rest = runs.train(*small, *both, **hub.environment())
    assert rest.returncode == 0, rest.stderr
    (attempt,) = {path.rpartition("/step-")[0] for path in there_before}
    assert f"fetched from buckets/me/run/{attempt}: there is none here" in rest.stdout
    assert runs.losses(there)  # each step once, the fetched ones too
    runs.assert_same_bits(runs.snapshot(finished_run, 30), runs.snapshot(there, 30))
    assert "hub       buckets/me/run has step 30" in rest.stdout
    assert steps_in(hub) == [10, 20, 30]
    # The finished run has nothing more to upload.
    before = len(hub.bucket(BUCKET).every_state)
    again = runs.train(*small, *both, **hub.environment())
    assert again.returncode == 0, again.stderr
    assert len(hub.bucket(BUCKET).every_state) == before
    # A new run begins from the bucket.
    new = [f"run.dir={tmp_path / 'new'}", "snapshot.resume=hf://buckets/me/run"]
    branch = runs.train(*small, *new, "train.max_steps=40", **hub.environment())
    assert branch.returncode == 0, branch.stderr
    assert "from hf://buckets/me/run, step 30, as snapshot.resume asks" in branch.stdout


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_killed_while_uploading_the_bucket_is_whole(small, tmp_path, hub, kills, monkeypatch):
    hub.latency = (0.0, 0.03)
    chosen, last, hits = random.Random(4), 10 * (kills + 1), 0
    mine = words(tmp_path / "run", f"train.max_steps={last}", "optim.warmup_steps=2")
    for number in range(kills):
        until = len(hub.requests) + chosen.randrange(4, 30)
        more = [f"train.max_steps={10 * (number + 1)}"]
        with runs.started(runs.command(*small, *mine, *more), **hub.environment()) as process:
            while process.poll() is None and len(hub.requests) < until:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.005)
            hits += process.poll() is None
        if hub.bucket(BUCKET) is not None:
            assert_always_whole(hub)
    assert hits >= kills * 0.8
    result = runs.train(*small, *mine, **hub.environment())
    assert result.returncode == 0, result.stderr
    assert steps_in(hub)[-1] == last
    assert_always_whole(hub)
    hubs.lead_here(hub, monkeypatch)
    fetched = choose_start(tmp_path / "fetched", f"hf://buckets/{BUCKET}")
    assert fetched.state.step == last
