"""Promises 2 to 4 with a store of files: a folder, S3, a bucket of the Hub."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import pytest

import hubs
import runs
import stores
from config.compose import load_config
from config.schema import ConfigError
from snapshot.__main__ import main
from snapshot.disk.folder import manifest_sha256
from snapshot.disk.state import read_state
from snapshot.errors import SnapshotError
from snapshot.start import RunStore, choose_start
from store.attempt import Best, Card, Policy, UploadTarget
from store.errors import StoreMissing, StoreRefused, StoreUnreachable
from store.file_system import FileSystem
from store.kinds import open_store
from store.uploader import Uploader
from training.run.uploading import store_of

RUN, OTHER_RUN = "1" * 32, "2" * 32
FIRST, SECOND = "a" * 32, "b" * 32
POLICY = Policy(keep=3, min_interval=0.0, private=True, takeover=False)


def place_of(step: int, attempt: str = FIRST) -> str:
    """The folder of a snapshot in a store."""
    return f"snapshots/step-{step:08d}-{attempt[:8]}"


@pytest.fixture(params=stores.cases(stores.KINDS))
def place(request, tmp_path, monkeypatch):
    with stores.place(request.param, tmp_path, monkeypatch) as place:
        yield place


@pytest.fixture
def s3(tmp_path, monkeypatch):
    with stores.place("S3", tmp_path, monkeypatch) as place:
        yield place


@pytest.fixture
def folder(tmp_path, monkeypatch):
    with stores.place("a folder", tmp_path, monkeypatch) as place:
        yield place


def uploader(
    place: stores.Place,
    run_id: str = RUN,
    attempt_id: str = FIRST,
    timeout: float = 10.0,
    was_read: bool = False,
    **more,
) -> Uploader:
    """The uploads of an attempt, as often as it can."""
    policy = {name: more.pop(name) for name in vars(POLICY) if name in more}
    target = UploadTarget(
        place.open(timeout),
        replace(POLICY, **policy),
        run_id,
        attempt_id,
        was_read=was_read,
        **more,
    )
    return Uploader(target)


def upload(uploads: Uploader, *folders: Path, best: Best | None = None) -> None:
    for folder in folders:
        uploads.offer(folder, Card(""), best)
        assert uploads.flush(60), uploads.status()
        assert uploads.status().failure_text is None, uploads.status()


def best_known(place: stores.Place) -> tuple[int, float | None]:
    """Step and loss of the best snapshot, as another machine sees it."""
    remote = place.open()
    latest = remote.latest(remote.head())
    return latest.best_step, latest.best_loss


def started(place: stores.Place, run_dir: Path, takeover: bool = False):
    return choose_start(run_dir, "auto", RunStore(place.open(), private=True, takeover=takeover))


def assert_whole(place: stores.Place) -> None:
    """A folder with a manifest has all files that this lists, and no other."""
    paths = set(place.paths())
    for path in (path for path in paths if path.endswith("/manifest.json")):
        entries = {one["path"]: one for one in json.loads(place.read(path))["files"]}
        inside = path.removesuffix("manifest.json")
        assert {one for one in paths if one.startswith(inside)} == {
            path,
            *(inside + name for name in entries),
        }
        for name, entry in entries.items():
            content = place.read(inside + name)
            assert (len(content), sha256(content).hexdigest()) == (entry["size"], entry["sha256"])


def test_what_is_uploaded_to_a_new_store_comes_back(place, finished_run, tmp_path):
    assert started(place, tmp_path / "run").folder is None
    snapshots = [runs.snapshot(finished_run, step) for step in (10, 20, 30)]
    run_id = read_state(snapshots[0]).run_id
    uploads = uploader(place, run_id, was_read=True)
    upload(uploads, *snapshots)
    assert uploads.messages() == []
    assert uploads.status().sent.bytes_sent > 0
    assert place.steps() == [10, 20, 30]
    assert_whole(place)
    begun = started(place, tmp_path / "run")
    assert begun.state.step == begun.known_latest.step == 30
    assert manifest_sha256(begun.folder) == manifest_sha256(snapshots[-1])
    named = choose_start(tmp_path / "new", place.url)
    assert named.state.step == 30
    assert main(["list", place.url]) == 0


def test_pruned_are_all_but_the_newest_milestones_and_the_best(place, snapshot_of):
    uploads = uploader(place, keep=2, milestone_every=4)
    upload(uploads, *map(snapshot_of, range(1, 4)))
    best = snapshot_of(3)
    upload(uploads, *map(snapshot_of, range(4, 8)), best=Best(3, 1.0, best))
    assert place.steps() == [3, 4, 6, 7]
    folders = {path.rpartition("/")[0] for path in place.paths() if "/step-" in path}
    assert len(folders) == 4  # nothing is left of the others
    remote = place.open()
    latest = remote.latest(remote.head())  # as another machine sees it
    assert (latest.step, latest.best_step, latest.best_loss) == (7, 3, 1.0)
    later = uploader(place, attempt_id=SECOND, keep=1, known_latest=latest, was_read=True)
    upload(later, snapshot_of(9))
    assert place.steps() == [3, 9]
    assert_whole(place)


def test_the_best_snapshot_is_uploaded_even_after_newer_ones(folder, snapshot_of):
    uploads, best = uploader(folder, keep=1), Best(2, 1.0, snapshot_of(2))
    upload(uploads, snapshot_of(1))
    upload(uploads, snapshot_of(3), best=best)  # step 2 was not uploaded: the newest wins
    upload(uploads, *map(snapshot_of, (4, 5)), best=best)
    assert folder.steps() == [2, 5]
    # A later attempt that keeps none leaves it there, and the one after still knows it.
    for attempt, steps in ((SECOND, (6, 7)), ("c" * 32, (8,))):
        assert best_known(folder) == (2, 1.0)
        remote = folder.open()
        known = remote.latest(remote.head())
        later = uploader(folder, attempt_id=attempt, keep=1, known_latest=known, was_read=True)
        upload(later, *map(snapshot_of, steps))
    assert folder.steps() == [2, 8]
    assert_whole(folder)


def test_a_best_snapshot_that_a_store_has_not_is_ignored(folder, snapshot_of):
    """Or the next best one would have to be better than a loss that no snapshot has."""
    upload(uploader(folder), snapshot_of(3))
    for step, best in ((2, (0, None)), (3, (3, 1.0))):
        said = {**json.loads(folder.read("latest.json")), "best_step": step, "best_loss": 1.0}
        folder.put("latest.json", json.dumps(said).encode())
        assert best_known(folder) == best


def test_a_snapshot_that_is_damaged_there_is_passed_over(folder, finished_run, tmp_path):
    run_id = read_state(runs.snapshot(finished_run, 10)).run_id
    uploads = uploader(folder, run_id)
    upload(uploads, *(runs.snapshot(finished_run, step) for step in (10, 20, 30)))
    folder.remove(f"{place_of(30)}/model.safetensors")
    older = folder.read(f"{place_of(10)}/optimizer.safetensors")
    folder.put(f"{place_of(20)}/optimizer.safetensors", older)
    begun = started(folder, tmp_path / "run")
    assert begun.state.step == 10
    assert "model.safetensors is missing" in begun.warnings[0]
    assert "optimizer.safetensors has changed" in begun.warnings[1]


def test_what_another_attempt_is_uploading_is_not_deleted(s3, snapshot_of):
    first = uploader(s3, attempt_id=FIRST, keep=1)
    upload(first, snapshot_of(5))
    slow = s3.fault("hang", "PUT", path=f"{place_of(7, SECOND)}/manifest", times=1000)
    other = uploader(s3, attempt_id=SECOND, keep=1, was_read=True)
    other.offer(snapshot_of(7), Card(""))  # its contents are there, and its manifest hangs
    stores.wait_for(lambda: slow.hits)
    upload(first, *map(snapshot_of, (10, 11, 12)))
    assert f"{place_of(7, SECOND)}/model.safetensors" in s3.paths()
    slow.times = 0
    assert other.flush(60)
    assert_whole(s3)
    assert s3.steps() == [7, 12]


def test_leavings_of_an_attempt_that_is_over_are_deleted(folder, snapshot_of):
    upload(uploader(folder, attempt_id=FIRST), snapshot_of(5))
    half = folder.read(f"{place_of(5)}/model.safetensors")
    folder.put(f"{place_of(6)}/model.safetensors", half)
    ended = {"ended_attempts": (FIRST,), "was_read": True}
    upload(uploader(folder, attempt_id=SECOND, keep=1, **ended), snapshot_of(10))
    assert {path.rpartition("/")[0] for path in folder.paths() if "/step-" in path} == {
        place_of(10, SECOND)
    }


def test_a_snapshot_that_may_not_be_deleted_keeps_no_other(folder, snapshot_of, monkeypatch):
    """Object Lock and retention rules of a bucket refuse deletions."""
    delete = FileSystem.delete

    def refuse(store, path):
        if "step-00000001-" in path:
            raise StoreRefused("the object is locked")
        delete(store, path)

    monkeypatch.setattr(FileSystem, "delete", refuse)
    uploads = uploader(folder, keep=1)
    upload(uploads, *map(snapshot_of, range(1, 5)))
    assert folder.steps() == [1, 4]
    (said,) = uploads.messages()
    assert "the object is locked. Uploads continue." in said
    assert_whole(folder)


@pytest.mark.parametrize("takes_over", [False, True], ids=["same run", "takeover"])
def test_what_no_manifest_names_stays(place, snapshot_of, takes_over):
    upload(uploader(place, keep=3), *map(snapshot_of, (1, 2)))
    mine = {
        f"{place_of(1)}/notes.txt": b"in a snapshot",
        f"{place_of(2)}/model.safetensors": b"in place of a snapshot's",
    }
    for path, content in mine.items():
        place.put(path, content)
    run = OTHER_RUN if takes_over else RUN
    later = uploader(place, run, SECOND, keep=1, takeover=takes_over, was_read=True)
    upload(later, *map(snapshot_of, (4, 5)))
    assert {path: place.read(path) for path in mine} == mine
    others = {path for path in place.paths() if "/step-" in path} - mine.keys()
    assert {path.split("/")[1] for path in others} == {f"step-00000005-{SECOND[:8]}"}


@pytest.mark.parametrize(
    "path",
    ["notes.txt", "a/b/step-00000001/weights.safetensors", "metrics/notes.txt", "events.jsonl"],
)
def test_a_store_with_files_of_somebody_else_is_refused(place, tmp_path, path):
    place.put(path, b"mine")
    for takeover in (False, True):
        with pytest.raises(SnapshotError, match=r"which no run of this project uploaded"):
            started(place, tmp_path / "run", takeover)
    late = uploader(place)
    late.offer(tmp_path / "step-00000001", Card(""))
    assert late.flush(60)
    assert late.status().off
    assert place.paths() == [path]
    assert place.read(path) == b"mine"


def test_of_a_cut_off_upload_only_a_run_s_files_are_deleted(folder, snapshot_of):
    upload(uploader(folder), snapshot_of(1), snapshot_of(2))
    cut = f"{place_of(1)}/"
    folder.remove(f"{cut}manifest.json")
    mine = {f"{cut}notes.json": b"{}", f"{cut}lora.safetensors": b"mine"}
    for path, content in mine.items():
        folder.put(path, content)
    written = {path.name for path in snapshot_of(1).iterdir()} - {"manifest.json"}
    there = {path.removeprefix(cut) for path in folder.paths() if path.startswith(cut)}
    assert there > written
    ended = {"ended_attempts": (FIRST,), "was_read": True}
    upload(uploader(folder, attempt_id=SECOND, keep=1, **ended), *map(snapshot_of, (4, 5)))
    assert {path for path in folder.paths() if path.startswith(cut)} == set(mine)


def test_files_of_file_managers_are_ignored_and_stay(place, snapshot_of, tmp_path):
    upload(uploader(place, read_state(snapshot_of(3)).run_id), snapshot_of(3))
    names = (".DS_Store", "Thumbs.db", "._owner.json")
    folders = ("", "snapshots/", f"{place_of(3)}/")
    files = {folder + name for folder in folders for name in names}
    for path in files:
        place.put(path, b"desktop")
    assert started(place, tmp_path / "run").state.step == 3
    assert files <= set(place.paths())


def test_a_store_that_cannot_be_listed_is_not_a_new_one(folder, snapshot_of, tmp_path, monkeypatch):
    """Also where only the newest attempt cannot: the run would go on from an older step."""
    upload(uploader(folder), snapshot_of(1))
    upload(uploader(folder, attempt_id=SECOND, was_read=True), snapshot_of(2))
    real = os.scandir

    def scandir(path="."):
        if str(path).endswith(SECOND[:8]):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(StoreUnreachable, match="it is unknown whether file:"):
        started(folder, tmp_path / "run")


def test_another_run_needs_a_takeover_and_then_replaces_all(place, snapshot_of, finished_run):
    upload(uploader(place, OTHER_RUN), snapshot_of(5))
    newest = runs.snapshot(finished_run, 30)
    with pytest.raises(SnapshotError, match=f"{place.key} holds another run"):
        started(place, newest.parent.parent)
    fenced = uploader(place, RUN, SECOND, was_read=True)
    fenced.offer(snapshot_of(6), Card(""))
    assert fenced.flush(30)
    assert fenced.status().off
    assert "another run has uploaded step 5 to " in fenced.messages()[0]
    upload(uploader(place, RUN, SECOND, takeover=True, was_read=True), snapshot_of(6))
    assert place.steps() == [6]


def test_of_two_attempts_of_a_run_the_later_start_owns_the_store(place, snapshot_of):
    first = uploader(place, attempt_id=FIRST, keep=2)
    upload(first, snapshot_of(5))
    remote = place.open()
    known = remote.latest(remote.head())
    later = uploader(place, attempt_id=SECOND, keep=2, known_latest=known, was_read=True)
    upload(first, snapshot_of(8))  # as a preempted machine does in its grace time
    upload(later, snapshot_of(7))
    first.offer(snapshot_of(10), Card(""))
    assert first.flush(60)
    assert first.status().off
    assert "another start of this run uploads to " in first.messages()[0]
    assert place.steps() == [5, 7, 8]
    upload(later, *map(snapshot_of, (9, 11)))
    assert place.steps() == [9, 11]
    latest = remote.latest(remote.head())
    assert (latest.attempt_id, latest.generation, latest.step) == (SECOND, 2, 11)
    assert_whole(place)


@pytest.mark.parametrize("kind", stores.cases(["a folder", "S3"]))
def test_of_two_runs_that_begin_at_once_one_keeps_the_store(
    kind, snapshot_of, tmp_path, monkeypatch
):
    with stores.place(kind, tmp_path, monkeypatch) as place:
        one, other = uploader(place, RUN, FIRST), uploader(place, OTHER_RUN, SECOND)
        one.offer(snapshot_of(1), Card(""))
        other.offer(snapshot_of(2), Card(""))
        assert one.flush(60)
        assert other.flush(60)
        if not (one.status().off or other.status().off):
            # They wrote latest.json at the same moment. The next upload of each finds the last.
            for uploads in (one, other):
                uploads.offer(snapshot_of(3), Card(""))
                assert uploads.flush(60)
        assert sorted([one.status().off, other.status().off]) == [False, True]
        fenced = one if one.status().off else other
        assert any("this one stops uploading" in said for said in fenced.messages())
        kept = other if fenced is one else one
        upload(kept, snapshot_of(4))
        # With a takeover the other one replaces it, and that one finds out.
        upload(uploader(place, "3" * 32, "c" * 32, takeover=True, was_read=True), snapshot_of(5))
        kept.offer(snapshot_of(6), Card(""))
        assert kept.flush(60)
        assert kept.status().off
        assert "another run has uploaded step 5 to " in "".join(kept.messages())
        assert 6 not in place.steps()


FAULTS = {
    "503 on contents": ("status", "PUT", {"times": 2}),
    "503 on contents for long": ("status", "PUT", {"times": 40}),
    "500 on the listing": ("status", "GET", {"after": 2, "status": "500 Internal Server Error"}),
    "403 on a manifest": ("status", "PUT", {"path": "manifest", "status": "403 Forbidden"}),
    "a hang of a content": ("hang", "PUT", {"path": "model.safe"}),
    "a hang of the listing": ("hang", "GET", {"after": 2}),
    "a reset of a content": ("reset", "PUT", {"path": "optimizer"}),
    "the answer to a content lost": ("lost-answer", "PUT", {"path": "model.safe"}),
    "the answer to a manifest lost": ("lost-answer", "PUT", {"path": "manifest"}),
    "the answer to latest.json lost": ("lost-answer", "PUT", {"path": "latest"}),
    "a delete that fails": ("status", "DELETE", {}),
}
QUICK = {"a hang of a content", "the answer to a manifest lost"}
LONG = {"503 on contents for long"}


def mark_of(fault: str) -> list[pytest.MarkDecorator]:
    if fault in LONG:
        return [pytest.mark.slow]
    return [] if fault in QUICK else [pytest.mark.thorough]


@pytest.mark.parametrize("name", [pytest.param(one, marks=mark_of(one)) for one in FAULTS])
def test_a_fault_of_s3_costs_no_snapshot(s3, finished_run, tmp_path, monkeypatch, name):
    monkeypatch.setattr("store.uploader.REPROBE_SECONDS", 0.1)
    snapshots = [runs.snapshot(finished_run, step) for step in (10, 20, 30)]
    uploads = uploader(s3, read_state(snapshots[0]).run_id, timeout=1.0, keep=1)
    kind, method, more = FAULTS[name]
    fault = s3.fault(kind, method, **more)
    for folder in snapshots:
        uploads.offer(folder, Card(""))
        stores.wait_for(lambda: uploads.flush(60))
    assert fault.hits
    assert uploads.status().step == 30
    assert s3.steps()[-1] == 30
    assert_whole(s3)
    assert "secret-of-the-test" not in "".join(uploads.messages())
    assert started(s3, tmp_path / "run").state.step == 30


FAULTS_OF_THE_HUB = {
    "a hang of the contents": ("xorb", "hang", {}),
    "a hang after the contents": ("shard", "hang", {}),
    "a hang of the batch": ("bucket-batch", "hang", {"after": 1}),
    "a reset of the listing": ("bucket-tree", "reset", {"after": 1}),
    "the answer to a batch lost": ("bucket-batch", "lost-answer", {"times": 2}),
    "a batch that is not applied": ("bucket-batch", "partial", {"times": 2}),
    "403 on the batch": ("bucket-batch", "status", {"status": 403, "after": 1}),
    "503 on the contents": ("xorb", "status", {"status": 503, "times": 8}),
    "a download that hangs": ("bucket-get", "hang", {}),
    "a download that is cut off": ("bucket-get", "truncated", {}),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=() if one == "a hang after the contents" else pytest.mark.thorough)
        for one in FAULTS_OF_THE_HUB
    ],
)
def test_a_fault_of_a_bucket_of_the_hub_costs_no_snapshot(
    finished_run, tmp_path, monkeypatch, name
):
    monkeypatch.setattr("store.uploader.REPROBE_SECONDS", 0.1)
    snapshots = [runs.snapshot(finished_run, step) for step in (10, 20, 30)]
    endpoint, kind, more = FAULTS_OF_THE_HUB[name]
    with stores.place("a bucket of the Hub", tmp_path, monkeypatch) as place:
        uploads = uploader(place, read_state(snapshots[0]).run_id, timeout=1.0, keep=1)
        fault = place.hub.fault(endpoint, kind, **more)
        for folder in snapshots:
            uploads.offer(folder, Card(""))
            stores.wait_for(lambda: uploads.flush(60))
        assert (uploads.status().step, place.steps()[-1]) == (30, 30)
        assert_whole(place)
        assert "hf_loopback" not in "".join(uploads.messages())
        assert started(place, tmp_path / "run").state.step == 30
        assert fault.hits


def test_a_file_of_several_parts_is_whole_or_not_there(s3, tmp_path, monkeypatch):
    monkeypatch.setattr("store.file_system.BLOCK_BYTES", 5 << 20)
    content = random.Random(1).randbytes(12 << 20)
    store = s3.open(timeout=60.0)  # a part has 5 MiB
    s3.fault("status", "PUT", path="partNumber=2", status="403 Forbidden")
    path = f"{place_of(1)}/model.safetensors"
    with pytest.raises(StoreRefused, match="Check the credentials and their permissions"):
        store.write(path, BytesIO(content))
    assert s3.paths() == []
    assert store.write(path, BytesIO(content)) == sha256(content).hexdigest()
    assert s3.read(path) == content
    store.fetch(store.head(), [path], tmp_path / "back")
    assert (tmp_path / "back" / path).read_bytes() == content


def test_what_cannot_be_a_store_is_told_at_the_start(folder, s3, tmp_path, monkeypatch):
    unmounted = f"file://{tmp_path}/none/run"
    with pytest.raises(StoreRefused, match=r"there is no folder .*none\. Mount that disk"):
        choose_start(tmp_path / "run", "auto", RunStore(open_store(unmounted), True, False))
    with pytest.raises(StoreMissing, match=r"s3://none/run does not exist\. Create that bucket"):
        choose_start(tmp_path / "run", "auto", RunStore(open_store("s3://none/run"), True, False))
    for words, reason in {
        ("hub.url=https://a/b",): "must be the URL of a folder that can be written",
        ("hub.url=out/run",): "must be the URL of a folder",
        ("hub.url=s3://me:secret@a/b",): "must hold no user, password or query",
        ("hub.url=s3://a/b", "hub.repo_id=me/run"): "excludes hub.repo_id=me/run",
        ("hub.url=hf://buckets/me",): "must have the form hf://buckets/owner/name",
    }.items():
        with pytest.raises(ConfigError) as refused:
            load_config([*words])
        assert reason in str(refused.value)
    with pytest.raises(SnapshotError, match="needs a package: pip install dropboxdrivefs"):
        choose_start(tmp_path / "run", "dropbox://a/b")
    with pytest.raises(SnapshotError, match="fsspec has no ftx://"):
        store_of(load_config(["hub.url=ftx://a/b"]))
    s3.close()
    with pytest.raises(StoreUnreachable, match="it is unknown whether s3://shared/run holds"):
        choose_start(tmp_path / "run", "auto", RunStore(s3.open(1.0), True, False))


def test_no_token_of_the_hub_is_needed(folder, finished_run, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("store.hub.get_token", lambda: pytest.fail("the Hub's token was read"))
    assert started(folder, tmp_path / "run").warnings == ()


def words(place: stores.Place, run_dir: Path, *more: str) -> list[str]:
    mine = [word for word in hubs.words(run_dir, *more) if not word.startswith("hub.repo_id=")]
    return ["model.dropout=0.1", "train.eval_every=100", place.key, *mine]


@pytest.mark.parametrize("kind", stores.cases(stores.SHIPPED))
def test_a_run_goes_on_from_its_store_on_another_machine(
    kind, finished_run, small, tmp_path, monkeypatch
):
    with stores.place(kind, tmp_path, monkeypatch) as place:
        here, there = tmp_path / "here", tmp_path / "there"
        mine = words(place, here, "train.max_steps=30", "run.name=run")
        with runs.started(runs.command(*small, *mine), **place.environment) as process:
            stores.wait_for(lambda: "latest.json" in place.paths())
            process.kill()
        assert_whole(place)
        before = place.steps()[-1]
        shutil.rmtree(here)
        rest = runs.train(
            *small,
            *words(place, there, "train.max_steps=30", "run.name=run"),
            **place.environment,
        )
        assert rest.returncode == 0, rest.stderr
        if before < 30:
            assert f"fetched from {place.url}: " in rest.stdout
        assert runs.losses(there)  # each step once, the fetched ones too
        runs.assert_same_bits(runs.snapshot(finished_run, 30), runs.snapshot(there, 30))
        assert f"hub       {place.url} has step 30" in rest.stdout
        assert place.steps()[-1] == 30
        assert_whole(place)


@pytest.mark.slow
@pytest.mark.parametrize("kind", stores.SHIPPED)
def test_killed_while_uploading_the_store_is_whole(
    kind, finished_run, small, tmp_path, monkeypatch
):
    chosen = random.Random(5)
    with stores.place(kind, tmp_path, monkeypatch) as place:
        mine = words(place, tmp_path / "run", "train.max_steps=30")
        for _ in range(5):
            with runs.started(runs.command(*small, *mine), **place.environment) as process:
                until = len(place.paths()) + chosen.randrange(1, 12)
                stores.wait_for(
                    lambda process=process, until=until: (
                        process.poll() is not None or len(place.paths()) >= until
                    )
                )
                process.kill()
            assert_whole(place)
        result = runs.train(*small, *mine, **place.environment)
        assert result.returncode == 0, result.stderr
        assert place.steps()[-1] == 30
        assert_whole(place)
        shutil.rmtree(tmp_path / "run")
        fetched = started(place, tmp_path / "run")
        runs.assert_same_bits(runs.snapshot(finished_run, 30), fetched.folder)


def test_a_file_system_says_what_its_names_are():
    store = open_store("memory://shared/run/")
    assert (store.url, store.name, store.key) == (
        "memory://shared/run",
        "memory://shared/run",
        "hub.url=memory://shared/run",
    )
