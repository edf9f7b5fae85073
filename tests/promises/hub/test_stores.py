"""Promises 2 to 4 with each kind of store; the faults of all are in test_hub_faults."""

from __future__ import annotations

import json
import random
import shutil
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
from store.attempt import Best, Card
from store.errors import StoreMissing, StoreRefused, StoreUnreachable
from store.files import Files
from store.kinds import open_store
from store.uploader import Uploader
from training.run.records import store_of

RUN, OTHER_RUN = "1" * 32, "2" * 32
FIRST, SECOND, THIRD = "a" * 32, "b" * 32, "c" * 32


def place_of(step: int, attempt: str = FIRST) -> str:
    """The folder of a snapshot in a store."""
    return f"snapshots/step-{step:08d}-{attempt[:8]}"


@pytest.fixture(params=stores.cases(stores.KINDS))
def place(request, tmp_path, monkeypatch):
    with stores.place(request.param, tmp_path, monkeypatch) as place:
        place.open().create(private=True)
        yield place


@pytest.fixture
def folder(tmp_path, monkeypatch):
    with stores.place("a folder", tmp_path, monkeypatch) as place:
        place.open().create(private=True)
        yield place


@pytest.fixture
def s3(tmp_path, monkeypatch):
    with stores.place("S3", tmp_path, monkeypatch) as place:
        yield place


def uploader(place: stores.Place, run_id: str = RUN, attempt_id: str = FIRST, **more) -> Uploader:
    """The uploads of an attempt, as often as it can."""
    return hubs.uploader(place.open(10.0), run_id=run_id, attempt_id=attempt_id, **more)


def started(place: stores.Place, run_dir: Path, takeover: bool = False):
    return choose_start(run_dir, "auto", RunStore(place.open(), private=True, takeover=takeover))


def test_what_is_uploaded_to_a_new_store_comes_back(place, finished_run, tmp_path):
    assert started(place, tmp_path / "run").folder is None
    snapshots = [runs.snapshot(finished_run, step) for step in (10, 20, 30)]
    run_id = read_state(snapshots[0]).run_id
    uploads = uploader(place, run_id)
    hubs.upload_each(uploads, *snapshots)
    assert uploads.messages() == []
    assert place.steps() == [10, 20, 30]
    place.assert_whole()
    begun = started(place, tmp_path / "run")
    assert begun.state.step == begun.known_latest.step == 30
    assert manifest_sha256(begun.folder) == manifest_sha256(snapshots[-1])
    named = choose_start(tmp_path / "new", place.url)
    assert named.state.step == 30
    assert main(["list", place.url]) == main(["status", place.url]) == 0


def test_pruned_are_all_but_the_newest_milestones_and_the_best(place, snapshot_of):
    uploads = uploader(place, keep=2, milestone_every=4)
    hubs.upload_each(uploads, *map(snapshot_of, range(1, 4)))
    hubs.upload_each(uploads, *map(snapshot_of, range(4, 8)), best=Best(3, 1.0))
    assert place.steps() == [3, 4, 6, 7]
    folders = {path.rpartition("/")[0] for path in place.paths() if "/step-" in path}
    assert len(folders) == 4  # nothing is left of the others
    latest = place.latest()
    assert (latest.step, latest.best_step, latest.best_loss) == (7, 3, 1.0)
    later = uploader(place, attempt_id=SECOND, keep=1, seen=latest)
    hubs.upload_each(later, snapshot_of(9))
    assert place.steps() == [3, 9]
    place.assert_whole()


def test_the_best_snapshot_is_uploaded_even_if_there_are_newer_ones(place, snapshot_of):
    uploads, best = uploader(place, keep=1), Best(2, 1.0)
    for step in (1, 2):
        uploads.offer(snapshot_of(step), Card(""))
    hubs.upload_each(uploads, snapshot_of(3), best=best)
    hubs.upload_each(uploads, *map(snapshot_of, (4, 5)), best=best)
    assert place.steps() == [2, 5]
    # A later attempt that keeps none leaves it there, and the one after still knows it.
    for attempt, steps in ((SECOND, (6, 7)), (THIRD, (8,))):
        known = place.latest()
        assert (known.best_step, known.best_loss) == (2, 1.0)
        later = uploader(place, attempt_id=attempt, keep=1, seen=known)
        hubs.upload_each(later, *map(snapshot_of, steps))
    assert place.steps() == [2, 8]
    hubs.upload_each(later, snapshot_of(9), best=Best(8, 0.5))
    assert place.steps() == [8, 9]
    place.assert_whole()
    # Another run has another best.
    other = uploader(place, OTHER_RUN, "d" * 32, seen=place.latest(), takeover=True)
    hubs.upload_each(other, snapshot_of(6))
    assert place.steps() == [6]
    assert (place.latest().best_step, place.latest().best_loss) == (0, None)


def test_a_best_snapshot_that_a_store_has_not_is_ignored(folder, snapshot_of):
    """Or the next best one would have to be better than a loss that no snapshot has."""
    hubs.upload_each(uploader(folder), snapshot_of(3))
    for step, best in ((2, (0, None)), (3, (3, 1.0))):
        said = {**json.loads(folder.read("latest.json")), "best_step": step, "best_loss": 1.0}
        folder.put("latest.json", json.dumps(said).encode())
        latest = folder.latest()
        assert (latest.best_step, latest.best_loss) == best


def test_a_snapshot_that_is_damaged_there_is_passed_over(folder, finished_run, tmp_path):
    run_id = read_state(runs.snapshot(finished_run, 10)).run_id
    uploads = uploader(folder, run_id)
    hubs.upload_each(uploads, *(runs.snapshot(finished_run, step) for step in (10, 20, 30)))
    folder.remove(f"{place_of(30)}/model.safetensors")
    older = folder.read(f"{place_of(10)}/optimizer.safetensors")
    folder.put(f"{place_of(20)}/optimizer.safetensors", older)
    begun = started(folder, tmp_path / "run")
    assert begun.state.step == 10
    assert "model.safetensors is missing" in begun.warnings[0]
    assert "optimizer.safetensors has changed" in begun.warnings[1]


def test_what_another_attempt_is_uploading_is_not_deleted(s3, snapshot_of):
    first = uploader(s3, attempt_id=FIRST, keep=1)
    hubs.upload_each(first, snapshot_of(5))
    slow = s3.fault(f"PUT {place_of(7, SECOND)}/manifest", "hang", times=1000)
    other = hubs.uploader(s3.open(2.0), run_id=RUN, attempt_id=SECOND, keep=1)
    other.offer(snapshot_of(7), Card(""))  # its contents are there, and its manifest hangs
    stores.wait_for(lambda: slow.hits)
    hubs.upload_each(first, *map(snapshot_of, (10, 11, 12)))
    assert f"{place_of(7, SECOND)}/model.safetensors" in s3.paths()
    slow.times = 0
    assert other.flush(60)
    s3.assert_whole()
    assert s3.steps() == [7, 12]


def test_a_snapshot_that_may_not_be_deleted_keeps_no_other(folder, snapshot_of, monkeypatch):
    """Object Lock and retention rules of a bucket refuse deletions."""
    delete = Files.delete

    def refuse(store, path):
        if "step-00000001-" in path:
            raise StoreRefused("the object is locked")
        delete(store, path)

    monkeypatch.setattr(Files, "delete", refuse)
    uploads = uploader(folder, keep=1)
    hubs.upload_each(uploads, *map(snapshot_of, range(1, 5)))
    assert folder.steps() == [1, 4]
    (said,) = uploads.messages()
    assert "the object is locked. Uploads continue." in said
    folder.assert_whole()


@pytest.mark.parametrize("takes_over", [False, True], ids=["same run", "takeover"])
def test_what_no_manifest_names_stays(place, snapshot_of, takes_over):
    hubs.upload_each(uploader(place, keep=3), *map(snapshot_of, (1, 2)))
    mine = {
        f"{place_of(1)}/notes.txt": b"in a snapshot",
        f"{place_of(2)}/model.safetensors": b"in place of a snapshot's",
        f"{place_of(9, THIRD)}/model.safetensors": b"no snapshot",
        "model-00001-of-00002.safetensors": b"at the top",
        "model.gguf": b"made of it",
    }
    for path, content in mine.items():
        place.put(path, content)
    run, known = OTHER_RUN if takes_over else RUN, place.latest()
    later = uploader(place, run, SECOND, keep=1, seen=known, takeover=takes_over)
    hubs.upload_each(later, *map(snapshot_of, (4, 5)), best=Best(4, 1.0))
    assert {path: place.read(path) for path in mine} == mine
    others = {path for path in place.paths() if "/step-" in path} - mine.keys()
    folders = {path.rpartition("/")[0] for path in others}
    assert folders == {place_of(4, SECOND), place_of(5, SECOND)}
    if isinstance(place, stores.HubRepo):
        # What was in the place of somebody's file is a manifest's, and is gone.
        listed = place.repo.files("main").values()
        needed = sum(entry.size for entry in listed if entry.is_lfs)
        assert place.repo.bytes_of_large() == needed


@pytest.mark.parametrize(
    "path",
    ["notes.txt", "a/b/step-00000001/weights.safetensors", "metrics.jsonl"],
)
def test_a_store_with_files_of_somebody_else_is_refused(place, tmp_path, path):
    place.put(path, b"mine")
    before = place.paths()
    for takeover in (False, True):
        with pytest.raises(SnapshotError, match=r"which no run of this project uploaded"):
            started(place, tmp_path / "run", takeover)
    late = uploader(place, unknown=True)
    late.offer(tmp_path / "step-00000001", Card(""))
    assert not late.flush(60)
    assert "which no run of this project uploaded" in late.messages()[0]
    assert place.paths() == before
    assert place.read(path) == b"mine"


def test_of_a_cut_off_upload_only_a_run_s_files_are_deleted(folder, snapshot_of):
    uploads = uploader(folder, keep=1)
    hubs.upload_each(uploads, snapshot_of(1))
    cut = f"{place_of(1)}/"
    folder.remove(f"{cut}manifest.json")
    mine = {f"{cut}notes.json": b"{}", f"{cut}lora.safetensors": b"mine"}
    for path, content in mine.items():
        folder.put(path, content)
    written = {path.name for path in snapshot_of(1).iterdir()} - {"manifest.json"}
    there = {path.removeprefix(cut) for path in folder.paths() if path.startswith(cut)}
    assert there > written
    hubs.upload_each(uploads, *map(snapshot_of, (4, 5)))
    assert {path for path in folder.paths() if path.startswith(cut)} == set(mine)


def test_another_run_needs_a_takeover_and_then_replaces_all(place, snapshot_of, finished_run):
    hubs.upload_each(uploader(place, OTHER_RUN), snapshot_of(5))
    newest = runs.snapshot(finished_run, 30)
    with pytest.raises(SnapshotError, match=f"{place.key} holds another run"):
        started(place, newest.parent.parent)
    fenced = uploader(place, RUN, SECOND)
    fenced.offer(snapshot_of(6), Card(""))
    assert fenced.flush(30)
    assert fenced.status().off
    assert "another run has uploaded step 5 to " in fenced.messages()[0]
    hubs.upload_each(uploader(place, RUN, SECOND, takeover=True), snapshot_of(6))
    assert place.steps() == [6]


def test_of_two_attempts_of_a_run_the_later_start_owns_the_store(place, snapshot_of):
    first = uploader(place, attempt_id=FIRST, keep=2)
    hubs.upload_each(first, snapshot_of(5))
    later = uploader(place, attempt_id=SECOND, keep=2, seen=place.latest())
    hubs.upload_each(first, snapshot_of(8))  # as a preempted machine does in its grace time
    hubs.upload_each(later, snapshot_of(7))
    first.offer(snapshot_of(10), Card(""))
    assert first.flush(60)
    assert first.status().off
    assert "another start of this run uploads to " in first.messages()[0]
    assert place.steps() == [5, 7, 8]
    hubs.upload_each(later, *map(snapshot_of, (9, 11)))
    assert place.steps() == [9, 11]
    latest = place.latest()
    assert (latest.attempt_id, latest.generation, latest.step) == (SECOND, 2, 11)
    place.assert_whole()


@pytest.mark.parametrize(
    "kind", ["a folder", pytest.param("S3", marks=pytest.mark.thorough), "a repo"]
)
def test_of_two_runs_that_begin_at_once_one_keeps_the_store(
    kind, snapshot_of, tmp_path, monkeypatch
):
    with stores.place(kind, tmp_path, monkeypatch) as place:
        place.open().create(private=True)
        both = uploader(place, RUN, FIRST), uploader(place, OTHER_RUN, SECOND)
        for step in (1, 2):  # where both wrote at the same moment, the next upload finds the last
            for uploads, first in zip(both, (0, 10), strict=True):
                uploads.offer(snapshot_of(first + step), Card(""))
            assert all(uploads.flush(60) for uploads in both)
        assert sorted(uploads.status().off for uploads in both) == [False, True]
        fenced, keeps = sorted(both, key=lambda uploads: not uploads.status().off)
        said = "".join(fenced.messages())
        assert "another run has uploaded step" in said
        assert "start again with hub.takeover=true" in said
        hubs.upload_each(keeps, snapshot_of(24))
        # With a takeover the other one replaces it, and that one finds out.
        third = uploader(place, "3" * 32, THIRD, takeover=True)
        hubs.upload_each(third, snapshot_of(25))
        keeps.offer(snapshot_of(26), Card(""))
        assert keeps.flush(60)
        assert keeps.status().off
        assert "another run has uploaded step 25 to " in "".join(keeps.messages())
        assert 26 not in place.steps()
        place.assert_whole()


def test_what_cannot_be_a_store_is_told_at_the_start(folder, s3, tmp_path, monkeypatch):
    unmounted = f"file://{tmp_path}/none/run"
    with pytest.raises(StoreRefused, match=r"No such file or directory: .*Check hub\.url=file:"):
        choose_start(tmp_path / "run", "auto", RunStore(open_store(unmounted), True, False))
    with pytest.raises(StoreMissing, match=r"s3://none/run does not exist\. Create it"):
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
    with pytest.raises(SnapshotError, match=r"cannot be opened by fsspec: .*dropboxdrivefs"):
        choose_start(tmp_path / "run", "dropbox://a/b")
    with pytest.raises(SnapshotError, match="cannot be opened by fsspec: Protocol not known: ftx"):
        store_of(load_config(["hub.url=ftx://a/b"]))
    s3.down()
    with pytest.raises(StoreUnreachable, match="it is unknown whether s3://shared/run holds"):
        choose_start(tmp_path / "run", "auto", RunStore(s3.open(1.0), True, False))


def words(place: stores.Place, run_dir: Path, *more: str) -> list[str]:
    mine = [word for word in hubs.words(run_dir, *more) if not word.startswith("hub.repo_id=")]
    return ["model.dropout=0.1", "train.eval_every=100", place.key, *mine]


@pytest.mark.parametrize("kind", stores.cases(stores.FILES))
def test_a_run_goes_on_from_its_store_on_another_machine(
    kind, finished_run, small, tmp_path, monkeypatch
):
    with stores.place(kind, tmp_path, monkeypatch) as place:
        here, there = tmp_path / "here", tmp_path / "there"
        mine = words(place, here, "train.max_steps=30", "run.name=run")
        with runs.started(runs.command(*small, *mine), **place.environment) as process:
            stores.wait_for(lambda: "latest.json" in place.paths())
            process.kill()
        place.assert_whole()
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
        place.assert_whole()


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        pytest.param("a repo", 3, marks=pytest.mark.thorough),
        *(
            pytest.param(kind, kills, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])
            for kind, kills in (("a repo", 20), ("S3", 20), ("a bucket of the Hub", 5))
        ),
    ],
)
def test_killed_while_uploading_nothing_is_half_there_or_twice(
    kind, kills, small, tmp_path, monkeypatch
):
    """Another ten steps each time, so that there is something to upload."""
    chosen, hits, last = random.Random(5), 0, 10 * (kills + 1)
    with stores.place(kind, tmp_path, monkeypatch) as place:
        mine = words(place, tmp_path / "run")
        for number in range(kills):
            more = runs.command(*small, *mine, f"train.max_steps={10 * (number + 1)}")
            until = len(place.requests) + chosen.randrange(6, 20)
            with runs.started(more, **place.environment) as process:
                stores.wait_for(
                    lambda process=process, until=until: (
                        process.poll() is not None or len(place.requests) >= until
                    )
                )
                hits += process.poll() is None
                process.kill()
            place.assert_whole()
        assert hits >= kills * 0.8
        result = runs.train(*small, *mine, f"train.max_steps={last}", **place.environment)
        assert result.returncode == 0, result.stderr
        assert runs.metrics(tmp_path / "run")[-1]["step"] == place.steps()[-1] == last
        place.assert_whole()
        fetched = started(place, tmp_path / "there")
        newest = runs.snapshot(tmp_path / "run", last)
        assert manifest_sha256(fetched.folder) == manifest_sha256(newest)
