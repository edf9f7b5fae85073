"""Attempts of a run with hub.standby meet in a store: one owns it, and no other one writes.

The repo is that of a loopback Hub; the others are all kinds of stores of files.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

import hubs
import runs
import stores
from disks import as_anybody
from loopback_hub import LoopbackHub
from many_snapshots import copied
from snapshot.__main__ import main
from snapshot.run_store import RunStore
from snapshot.start import choose_start
from store.errors import HubRefused, HubUnreachable
from store.fetch import read_repo
from store.kinds import open_store, ownership_of
from store.ownership import AGAIN, DONE, Owner, utc
from store.repo import Hub
from store.standby import Hold
from store.store import Card, Policy, UploadTarget
from store.uploader import Uploader
from training.reporting.metrics import as_line
from training.run.run_dir import RunLock

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"  # huggingface_hub 2.4 calls httpx2 so
)
RUN, FIRST, SECOND = "1" * 32, "a" * 32, "b" * 32
POLICY = Policy(keep=3, min_interval=0.0, squash_every=None, private=True, takeover=False)


KINDS = [
    pytest.param(kind, marks=() if kind == "a folder" else pytest.mark.slow)
    for kind in stores.KINDS
]


@pytest.fixture(params=["a repo", *KINDS])
def url(request, tmp_path, monkeypatch):
    """The URL of a new store, to which this process is led."""
    monkeypatch.setattr("store.files_ownership.SETTLE_SECONDS", 2.0)
    if request.param == "a repo":
        monkeypatch.setattr("store.uploader.FIRST_DELAY_SECONDS", 0.1)
        with LoopbackHub(tmp_path / "hub", new_port=True) as hub:
            hubs.lead_here(hub, monkeypatch)
            hub.create(hubs.REPO)
            yield f"hf://{hubs.REPO}"
    else:
        with stores.place(request.param, tmp_path, monkeypatch) as place:
            place.open().create(private=True)
            yield place.url


def attempt(name: str) -> Owner:
    return Owner(RUN, name, 60.0, "laptop", since=utc())


def owned_by(url: str, name: str) -> tuple[Hold, list[str]]:
    """An attempt that owns the store; and what it says when it has lost that."""
    ownership, lost = ownership_of(open_store(url, 5.0)), []
    owner = None
    while owner is None:  # a busy machine may be too slow for a bucket
        ownership.look()
        owner = ownership.take(attempt(name))
    return Hold(ownership, owner, lambda: lost.append(name)), lost


def uploads_of(url: str, hold: Hold) -> Uploader:
    store = open_store(url, 5.0)
    known = read_repo(store).owner
    target = UploadTarget(
        store, POLICY, RUN, hold.owner.attempt_id, known, owner=hold.owner, hold=hold
    )
    return Uploader(target)


def look(url: str) -> Owner | None:
    return ownership_of(open_store(url, 5.0)).look()


@pytest.fixture
def snapshot_of(finished_run, tmp_path):
    def of(step: int) -> Path:
        return copied(runs.snapshot(finished_run, 30), tmp_path / "made" / "snapshots", step)

    return of


def test_of_several_that_want_a_run_at_once_one_owns_it(url):
    """Twice: of a new store, and in the place of an owner."""
    for number in range(2):
        names, owners = [f"{number}{letter}" * 16 for letter in "abcd"], []
        ready = threading.Barrier(len(names))

        def want(name: str, ready=ready, owners=owners) -> None:
            ownership = ownership_of(open_store(url, 10.0))
            ownership.look()
            ready.wait()
            if (owner := ownership.take(attempt(name))) is not None:
                owners.append(owner.attempt_id)

        threads = [threading.Thread(target=want, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # In a bucket the first of them may have been too slow: then nobody owns the run for now.
        assert len(owners) <= 1
        assert owners or "buckets" in url
        assert not owners or look(url).attempt_id == owners[0]


def test_a_commit_between_the_look_and_the_claim_refuses_the_claim(near_hub):
    """The Hub compares the parent, so no pause of an attempt makes a second owner."""

    class Late(Hub):
        def commit(self, *arguments) -> str:
            near_hub.commit_files(hubs.REPO, {"note.txt": b"by somebody else"})
            return super().commit(*arguments)

    repo = near_hub.create(hubs.REPO)
    ownership = ownership_of(Late(hubs.REPO, 5.0))
    ownership.look()
    assert ownership.take(attempt(FIRST)) is None
    with pytest.raises(HubRefused, match=r"holds note\.txt and no latest\.json"):
        look(f"hf://{hubs.REPO}")
    assert not repo.tags


def test_an_owner_s_signs_of_life_and_its_end_are_seen(url, capsys, snapshot_of):
    assert look(url) is None
    hold, _ = owned_by(url, FIRST)
    assert look(url).machine == "laptop"
    seen = [look(url).sign]
    for second in (10, 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("store.repo_ownership.time.time", lambda s=second: 2e9 + s)
            hold._ownership.sign(hold.owner)
        seen.append(look(url).sign)
    assert len(set(seen)) == 3
    begun = choose_start(Path("/nonexistent/run"), "auto", RunStore(open_store(url), True, False))
    assert begun.folder is None  # an owner without a snapshot: the run begins at step 1
    uploads = uploads_of(url, hold)
    uploads.offer(snapshot_of(10), Card("# card\n"))
    assert uploads.flush(30), uploads.status()
    assert (look(url).step, look(url).ended) == (10, "")
    uploads.ends_as(AGAIN)
    uploads.offer(snapshot_of(20), Card("# card\n"), is_last=True)
    assert uploads.flush(30), uploads.status()
    assert (look(url).step, look(url).ended) == (20, AGAIN)
    assert main(["status", url]) == 0
    said = capsys.readouterr().out
    assert "owner     attempt aaaaaaaa on laptop" in said
    assert "step      20 is the newest there" in said
    assert "state     stopped, to be started again" in said


def test_the_status_of_an_attempt_without_a_standby(url, capsys, snapshot_of):
    store = open_store(url, 5.0)
    uploads = Uploader(UploadTarget(store, POLICY, RUN, FIRST, owner=attempt(FIRST)))
    uploads.offer(snapshot_of(10), Card("# card\n"))
    assert uploads.flush(30), uploads.status()
    assert main(["status", url]) == 0
    said = capsys.readouterr().out
    assert "owner     attempt aaaaaaaa on laptop" in said
    assert "state     training" in said


@pytest.mark.parametrize("words", [["status", "nothing/here/at/all"], ["status"], ["status", "."]])
def test_a_status_of_nothing_is_a_mistake(words, capsys):
    with pytest.raises(SystemExit) if len(words) == 1 else nullcontext():
        assert main(words) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_status_of_a_run_s_folder(finished_run, capsys):
    assert main(["status", str(finished_run)]) == 0
    said = capsys.readouterr().out
    assert "step      30 is the newest" in said
    assert "state     ended: all steps are done (exit code 0)" in said


@pytest.mark.parametrize(
    ("mode", "state"), [(0o444, "training"), (0o000, "unknown: RUN/.lock cannot be read (Perm")]
)
def test_the_status_of_another_user_s_run(tmp_path, capsys, mode, state):
    run_dir, lock = tmp_path / "run", RunLock()
    lock.acquire(run_dir)
    (run_dir / "metrics.jsonl").write_bytes(as_line({"event": "train", "step": 1, "loss": 1.0}))
    (run_dir / ".lock").chmod(mode)
    with as_anybody():
        assert main(["status", str(run_dir)]) == 0
    assert f"state     {state.replace('RUN', str(run_dir))}" in capsys.readouterr().out
    (run_dir / ".lock").chmod(0o444)
    lock.release()
    with as_anybody():
        assert main(["status", str(run_dir)]) == 0
    assert "state     silent: no process of this machine trains here" in capsys.readouterr().out


def test_an_owner_that_comes_back_is_fenced(url, snapshot_of):
    """It has uploaded before, is silent while another one takes over, and uploads again."""
    first, lost = owned_by(url, FIRST)
    uploads = uploads_of(url, first)
    uploads.offer(snapshot_of(10), Card("# card\n"))
    assert uploads.flush(30), uploads.status()
    second, _ = owned_by(url, SECOND)
    before = sorted(open_store(url).files(open_store(url).head()[0]))
    uploads.offer(snapshot_of(20), Card("# card\n"))
    stores.wait_for(lambda: uploads.status().failure and uploads.status().failure.is_held)
    assert lost == [FIRST]
    assert sorted(open_store(url).files(open_store(url).head()[0])) == before
    assert look(url).attempt_id == SECOND
    other = uploads_of(url, second)
    other.offer(snapshot_of(30), Card("# card\n"))
    assert other.flush(30), other.status()
    assert look(url).step == 30


def test_an_owner_without_a_snapshot_that_comes_back_is_fenced(url, snapshot_of):
    first, lost = owned_by(url, FIRST)
    uploads = uploads_of(url, first)
    owned_by(url, SECOND)
    uploads.offer(snapshot_of(10), Card("# card\n"))
    stores.wait_for(lambda: uploads.status().failure and uploads.status().failure.is_held)
    assert lost == [FIRST]
    assert (look(url).attempt_id, look(url).step) == (SECOND, 0)


def test_signs_of_life_are_no_commits_and_hold_no_snapshot(near_hub, monkeypatch):
    """A tag changes; at a server without tags the heartbeats of the uploads are the signs."""
    repo = near_hub.create(hubs.REPO)
    hold, _ = owned_by(f"hf://{hubs.REPO}", FIRST)
    commits = near_hub.count("commit")
    for second in range(5):
        monkeypatch.setattr("store.repo_ownership.time.time", lambda s=second: 2e9 + s)
        hold._ownership.sign(hold.owner)
    assert near_hub.count("commit") == commits == 1
    assert [*repo.tags] == ["alive-aaaaaaaa-2000000004"]
    assert Hub(hubs.REPO).refs() == {}
    hold.release(DONE)
    assert not repo.tags
    assert (look(f"hf://{hubs.REPO}").ended, near_hub.count("commit")) == (DONE, 2)


def test_without_tags_an_owner_announces_the_silence_of_commits(near_hub):
    near_hub.create(hubs.REPO)
    near_hub.fault("tag", "status", status=404, times=None)
    hold, _ = owned_by(f"hf://{hubs.REPO}", FIRST)
    hold._ownership.sign(hold.owner)
    assert look(f"hf://{hubs.REPO}").silence_seconds == 3600


def test_a_repo_whose_latest_json_is_deleted_is_neither_free_nor_lost(near_hub, snapshot_of):
    near_hub.create(hubs.REPO)
    url = f"hf://{hubs.REPO}"
    hold, lost = owned_by(url, FIRST)
    uploads = uploads_of(url, hold)
    uploads.offer(snapshot_of(10), Card("# card\n"))
    assert uploads.flush(30), uploads.status()
    near_hub.commit_files(hubs.REPO, {}, delete=["latest.json"])
    for ask in (hold._sign, ownership_of(open_store(url, 5.0)).look):
        with pytest.raises(HubRefused, match=r"and no latest\.json, so its owner is unknown"):
            ask()
    assert lost == []


def test_an_owner_does_not_upload_to_a_store_that_lacks_its_claim(
    tmp_path, monkeypatch, snapshot_of
):
    """The folder is there, and the disk is not."""
    with stores.place("a folder", tmp_path, monkeypatch) as place:
        place.open().create(private=True)
        hold, lost = owned_by(place.url, FIRST)
        uploads = uploads_of(place.url, hold)
        place.folder.rename(tmp_path / "unmounted")
        place.folder.mkdir()
        uploads.offer(snapshot_of(10), Card(""))
        stores.wait_for(lambda: uploads.status().failure)
        assert "lacks this attempt's claim" in uploads.status().failure_text
        assert (place.paths(), lost) == ([], [])
        for _ in range(2):
            hold._note_failure(HubUnreachable("down"))
        assert "signs of life to standbys fail: down" in "".join(uploads.messages())
        place.folder.rmdir()
        (tmp_path / "unmounted").rename(place.folder)
        assert uploads.flush(30), uploads.status()
        assert place.steps() == [10]


def test_a_look_is_two_requests_while_nothing_changes(near_hub):
    near_hub.create(hubs.REPO)
    owned_by(f"hf://{hubs.REPO}", FIRST)
    ownership = ownership_of(Hub(hubs.REPO, 5.0))
    ownership.look()
    before = len(near_hub.requests)
    for _ in range(3):
        ownership.look()
    assert [one.endpoint for one in near_hub.requests[before:]] == ["info", "refs"] * 3


def test_the_card_names_the_owner(near_hub, finished_run):
    """The row of the card that is there is replaced, and the rest of the card stays."""
    repo = near_hub.create(hubs.REPO)
    first, _ = owned_by(f"hf://{hubs.REPO}", FIRST)
    uploads = uploads_of(f"hf://{hubs.REPO}", first)
    card = "# mine\n\n| | |\n|---|---|\n| owner | nobody |\n| step | 10 |\n\nThe end.\n"
    uploads.offer(runs.snapshot(finished_run, 10), Card(card))
    assert uploads.flush(30), uploads.status()
    owned_by(f"hf://{hubs.REPO}", SECOND)
    said = repo.read(repo.head, "README.md").decode()
    assert "| owner | attempt bbbbbbbb on laptop, since " in said
    assert "; training at " in said
    assert said.replace(said.split("\n")[4], "| owner | nobody |") == card
