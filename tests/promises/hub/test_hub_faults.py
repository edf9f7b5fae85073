"""Promise 4: the Hub never hurts training. Every fault that a store can have, while a run uploads.

Whatever happens, training ends with exit code 0, the newest snapshot is in the store as soon as
that is back, and nobody ever saw half a snapshot.

The faults meet the uploader in this process, which is given the snapshots of one run; the client
is the real one. Two faults, and what only a process can show, meet runs.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from huggingface_hub import constants

import hubs
import runs
import stores
from config.compose import load_config
from loopback_hub import LoopbackHub
from paced import paced, read_until
from snapshot.disk.folder import manifest_sha256
from snapshot.disk.state import read_state
from snapshot.errors import SnapshotError
from snapshot.start import RunStore, Start, choose_start, newest_of_disk_and_store
from store.errors import StoreRefused, StoreUnreachable
from store.hub import Hub
from store.kinds import open_store
from store.uploader import Uploader
from training.distributed.processes import USER_MISTAKES, exit_code_for

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"  # huggingface_hub 2.4 calls httpx2 so
)
STEPS = 30
SECRETS = ("hf_loopbackOfMeMayWrite", "signature=", "secret-of-the-test")


def overrides(small: list[str], run_dir: Path, *more: str) -> list[str]:
    return [
        *small,
        *hubs.words(run_dir),
        f"train.max_steps={STEPS}",
        "train.eval_every=100",
        "snapshot.every=10",
        "hub.timeout_seconds=2",
        *more,
    ]


def assert_uploaded(hub: LoopbackHub, result, step: int = STEPS) -> None:
    """The run ended well, and its last snapshot is on the Hub."""
    assert result.returncode == 0, result.stderr
    assert f"hub       {hubs.REPO} has step {step}" in result.stdout, result.stdout
    assert hubs.step_of(hub) == step
    hubs.assert_always_whole(hub)
    assert_no_secrets(result)


def assert_no_secrets(result, *folders: Path) -> None:
    texts = [result.stdout, result.stderr]
    for folder in folders:
        texts += [path.read_bytes().decode("latin-1") for path in files_below(folder)]
    for secret in SECRETS:
        assert not any(secret in text for text in texts)


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def started_empty(folder: Path, seconds: float = 1.0) -> Start:
    """What a run finds out at its start, with nothing on its disk and so long to wait."""
    return newest_of_disk_and_store(
        hubs.store(seconds), Start(None, None, ""), folder / "snapshots"
    )


def offer(uploads: Uploader, snapshot: Path) -> None:
    """What the loop does at a snapshot, and in the lines about a step."""
    uploads.offer(snapshot, hubs.card(snapshot))
    assert uploads.pending_folders()
    uploads.status()
    uploads.messages()


LIMIT = {"ratelimit": '"api";r=0;t=1', "ratelimit-policy": '"fixed window";"api";q=500;w=300'}
SECOND = {"status": 429, "headers": {"Retry-After": "1"}}
TEN_YEARS = {"status": 429, "headers": {"Retry-After": "315360000"}}
REPO, LFS, BUCKET = "a repo", "a repo without Xet", "a bucket of the Hub"
QUICK, COSTLY, SLOW = (), pytest.mark.thorough, pytest.mark.slow
FAULTS = [
    (REPO, QUICK, "connections refused", ("*", "refuse", {"after": 4, "times": 2})),
    (REPO, SLOW, "refused until the client gives up", ("*", "refuse", {"after": 13, "times": 6})),
    (REPO, COSTLY, "a hang in the contents", ("xorb", "hang", {"after": 1})),
    (REPO, COSTLY, "a hang after the contents", ("shard", "hang", {"after": 1})),
    (REPO, QUICK, "a reset in the middle of a content", ("xorb", "reset", {"after": 1})),
    (
        REPO,
        COSTLY,
        "contents: answer lost",
        ("xorb", "lost-answer", {}),
        ("shard", "lost-answer", {}),
    ),
    (REPO, QUICK, "401, the storage's token is not taken", ("xorb", "status", {"status": 401})),
    (REPO, QUICK, "403 on the contents", ("xorb", "status", {"status": 403, "after": 1})),
    (REPO, COSTLY, "507, the storage is full", ("xorb", "status", {"status": 507, "times": 8})),
    (REPO, QUICK, "500 before the commit", ("commit", "status", {"status": 500, "times": 2})),
    (REPO, COSTLY, "a wait of ten years asked for", ("xorb", "status", TEN_YEARS)),
    (REPO, QUICK, "the answer to a commit lost", ("commit", "lost-answer", {"times": 2})),
    (REPO, COSTLY, "applied, answered with 500", ("commit", "lost-answer", {"status": 500})),
    (REPO, QUICK, "409, another commit runs", ("commit", "status", {"status": 409, "times": 2})),
    (REPO, QUICK, "429 on the commit", ("commit", "status", {**SECOND, "times": 2})),
    (REPO, COSTLY, "429 on the contents", ("xorb", "status", {"status": 429, "headers": LIMIT})),
    (REPO, QUICK, "403, the storage is full", ("commit", "status", {"status": 403, "after": 1})),
    (REPO, QUICK, "a card that cannot be judged", ("validate-yaml", "status", {"status": 503})),
    (LFS, COSTLY, "a hang in the contents", ("put", "hang", {"after": 1})),
    (LFS, QUICK, "a reset in the middle of a content", ("put", "reset", {"after": 1})),
    (LFS, COSTLY, "a wait of ten years asked for", ("batch", "status", TEN_YEARS)),
    (LFS, COSTLY, "429 on the contents", ("batch", "status", {"status": 429, "headers": LIMIT})),
    (BUCKET, QUICK, "a hang after the contents", ("shard", "hang", {})),
    (BUCKET, COSTLY, "a reset of the listing", ("bucket-tree", "reset", {"after": 1})),
    (BUCKET, COSTLY, "the answer to a batch lost", ("bucket-batch", "lost-answer", {"times": 2})),
    (BUCKET, COSTLY, "a batch that is not applied", ("bucket-batch", "status", {"times": 2})),
    (BUCKET, QUICK, "applied by half", ("bucket-batch", "status", {"after": 1, "status": 200})),
    (BUCKET, COSTLY, "a download that is cut off", ("xorb-get", "truncated", {})),
    ("S3", COSTLY, "503 on contents", ("PUT", "status", {"times": 2})),
    ("S3", SLOW, "503 on contents for long", ("PUT", "status", {"times": 20})),
    ("S3", COSTLY, "500 on the listing", ("GET", "status", {"after": 2, "status": 500})),
    ("S3", COSTLY, "403 on a manifest", ("PUT manifest", "status", {"status": 403})),
    ("S3", QUICK, "a hang of a content", ("PUT model.safe", "hang", {})),
    ("S3", COSTLY, "a hang of the listing", ("GET", "hang", {"after": 2})),
    ("S3", COSTLY, "a reset of a content", ("PUT optimizer", "reset", {})),
    ("S3", COSTLY, "the answer to a content lost", ("PUT model.safe", "lost-answer", {})),
    ("S3", QUICK, "the answer to a manifest lost", ("PUT manifest", "lost-answer", {})),
    ("S3", COSTLY, "the answer to latest.json lost", ("PUT latest", "lost-answer", {})),
    ("S3", COSTLY, "a delete that fails", ("DELETE", "status", {})),
]
"""The kind of a store, how costly the row is, what happens, and with which faults.

Slow is where the client itself waits 1, 2, 4, 8 and 8 seconds before it gives up.
"""


@pytest.mark.parametrize(
    ("kind", "details"),
    [
        pytest.param(kind, details, marks=cost, id=f"{kind} - {name}")
        for kind, cost, name, *details in FAULTS
    ],
)
def test_a_fault_costs_no_step_and_no_snapshot(kind, details, finished_run, tmp_path, monkeypatch):
    """Nothing that the loop calls fails. That it does not wait either: the test after the next.

    The snapshot that meets the last fault is brought to the store before there is a newer one.
    """
    monkeypatch.setattr("store.uploader.REPROBE_SECONDS", 0.1)
    folders = [runs.snapshot(finished_run, step) for step in (10, 20, 30)]
    with stores.place(kind, tmp_path, monkeypatch) as place:
        faults = [place.fault(endpoint, fault, **more) for endpoint, fault, more in details]
        run_id = read_state(folders[0]).run_id
        uploads = hubs.uploader(place.open(1.0), run_id=run_id, keep=1, unknown=True)
        for folder in folders:
            offer(uploads, folder)
            stores.wait_for(lambda: uploads.flush(60))
            status = uploads.status()
            step = int(folder.name.removeprefix("step-"))
            assert (status.step, status.failure_text, status.off) == (step, None, False)
            assert place.steps()[-1] == step
        place.assert_whole()
        assert not any(secret in text for secret in SECRETS for text in uploads.messages())
        own = RunStore(place.open(), private=True, takeover=False)
        assert choose_start(tmp_path / "run", "auto", own).state.step == STEPS
        assert all(fault.hits for fault in faults)


def test_while_the_hub_hangs_the_loop_does_not_wait(near_hub, repo, finished_run):
    uploads = hubs.uploader(Hub(hubs.REPO, 60.0))
    hanging = near_hub.fault("commit", "hang", times=None)
    offer(uploads, runs.snapshot(finished_run, 10))
    near_hub.wait_for(lambda: hanging.hits)
    before = time.monotonic()
    offer(uploads, runs.snapshot(finished_run, 20))
    offer(uploads, runs.snapshot(finished_run, 30))
    assert not uploads.flush(0)
    assert time.monotonic() - before < 30  # not the 60 after which the request is given up
    assert hanging.hits == 1


def test_a_fault_during_a_run_costs_no_step_and_no_snapshot(small, tmp_path, hub):
    fault = hub.fault("commit", "lost-answer", times=2)
    result = runs.train(*overrides(small, tmp_path / "run"), **hub.environment())
    assert fault.hits
    assert_uploaded(hub, result)
    assert len(runs.losses(tmp_path / "run")) == STEPS


@pytest.mark.parametrize(
    ("endpoint", "kind"),
    [
        ("xorb-get", "truncated"),
        pytest.param("xorb-get", "corrupted", marks=pytest.mark.thorough),
        pytest.param("xorb-get", "reset", marks=pytest.mark.slow),
        pytest.param("xorb-get", "hang", marks=pytest.mark.slow),
        pytest.param("reconstruction", "truncated", marks=pytest.mark.slow),
        pytest.param("xet-read-token", "reset", marks=pytest.mark.thorough),
        pytest.param("resolve-head", "hang", marks=pytest.mark.slow),  # the client waits 10 s
        ("info", "refuse"),
        ("tree", "reset"),
        ("tree", "status"),  # a rate limit that lasts longer than a request may
    ],
)
def test_a_download_that_fails_once_is_made_again(near_hub, finished_run, tmp_path, endpoint, kind):
    hubs.seed(near_hub, runs.snapshot(finished_run, 10))
    limit = {"status": 429, "headers": {"Retry-After": "3"}} if kind == "status" else {}
    fault = near_hub.fault(endpoint, kind, **limit)
    begun = started_empty(tmp_path, 30.0 if kind == "hang" else 1.0)
    assert fault.hits
    assert begun.state.step == 10
    assert begun.folder == runs.snapshot(tmp_path, 10)
    assert begun.warnings == ()
    assert manifest_sha256(begun.folder) == manifest_sha256(runs.snapshot(finished_run, 10))
    assert [path.name for path in begun.folder.parent.iterdir()] == ["step-00000010"]


@pytest.mark.thorough
def test_an_expired_token_in_the_middle_of_a_run(small, tmp_path, hub):
    token = hub.default_token
    more = ["train.max_steps=200", "train.eval_every=200", "snapshot.every=20"]
    words = overrides(small, tmp_path / "run", *more)
    with paced(runs.command(*words), **hub.environment()) as (process, lines):
        said = read_until(lines, "step 21/")
        hub.wait_for(lambda: hub.count("commit") >= 1)
        hub.revoke(token)
        said += read_until(lines, "uploads wait")
        said += read_until(lines, "step 199/")
        hub.restore(token)
        out = "".join([*said, *lines])
        assert process.stderr is not None
        result = subprocess.CompletedProcess(words, process.wait(60), out, process.stderr.read())
    assert "warning: uploads wait: the Hub does not accept the token (HTTP 401" in result.stdout
    assert result.stdout.count("uploads wait") == 1
    assert "hf auth login" in result.stdout
    assert_uploaded(hub, result, 200)
    # What is behind is visible: step, age and the last error.
    behind = [record for record in runs.metrics(tmp_path / "run") if record.get("hub_error")]
    assert behind
    assert "401" in behind[0]["hub_error"]
    assert behind[0]["hub_step"] >= 20
    assert behind[0]["hub_age_seconds"] >= 0
    assert "old, last error: HTTP 401" in result.stdout
    assert_no_secrets(result, tmp_path / "run")
    repo = hub.repo(hubs.REPO)
    for commit in repo.every_head:
        for path in repo.files(commit):
            assert token.encode() not in repo.read(commit, path)


def test_a_token_that_stays_expired_costs_no_minute_at_the_end(near_hub, finished_run, tmp_path):
    started_empty(tmp_path)
    expired = near_hub.fault("info", "status", status=401, times=None)
    uploads = hubs.uploader()
    offer(uploads, runs.snapshot(finished_run, 30))
    near_hub.wait_for(lambda: expired.hits)
    assert not uploads.flush(100_000)
    failure = uploads.status().failure_text
    assert failure.startswith("the Hub does not accept the token (HTTP 401")
    assert (
        uploads.pending_folders()
    )  # the same command uploads it at its next start: test_uploading


def test_a_refusal_of_what_was_in_flight_leaves_the_newest_its_try(tmp_path, snapshot_of):
    """The end of the run begins to wait while an older snapshot is uploaded."""
    store, waits, tries = open_store(f"file://{tmp_path}/store"), Event(), []
    store.create(private=True)
    publish = store.publish

    def refuse_first(*request):
        tries.append(request)
        if len(tries) == 1:
            waits.wait(60)
            raise StoreRefused("the Hub refuses (HTTP 403)", "HTTP 403")
        return publish(*request)

    store.publish = refuse_first
    uploads = hubs.uploader(store)
    offer(uploads, snapshot_of(1))
    stores.wait_for(lambda: tries)
    offer(uploads, snapshot_of(2))
    assert uploads.flush(60, more=lambda: waits.set() is None)
    assert uploads.status().step == 2


REFUSALS = {
    "no token": ({"HF_TOKEN": ""}, [], "needs a token, and there is none"),
    "an unknown token": ({"HF_TOKEN": "hf_wrong"}, [], "does not accept the token"),
    "a token that may only read": ({"HF_TOKEN": "hf_read"}, [], "is read-only"),
    "somebody else's name": ({}, ["hub.repo_id=you/run"], "the Hub refuses (HTTP 403"),
    "a public repo": ({}, ["hub.repo_id=me/public"], "me/public is a public repo"),
    "a public bucket": (
        {},
        ["hub.url=hf://buckets/me/public", "hub.repo_id=null"],
        "me/public is a public repo",
    ),
    "a repo of something else": ({}, ["hub.repo_id=me/other"], "holds config.json"),
    "no repo's name": ({}, ["hub.repo_id=run"], "must have the form owner/name"),
    "a repo that is not there": (
        {},
        ["snapshot.resume=me/none", "hub.repo_id=null"],
        "snapshot.resume=me/none: there is no repo me/none",
    ),
    "a revision that is not there": (
        {},
        ["snapshot.resume=me/public@abc", "hub.repo_id=null"],
        "me/public has no such revision",
    ),
    "a repo without a snapshot": (
        {},
        ["snapshot.resume=me/public", "hub.repo_id=null"],
        "no snapshot in me/public",
    ),
}


def other_repos(hub: LoopbackHub) -> None:
    """A token that may only read, a public repo, and a repo of something else."""
    hub.add_token("hf_read", role="read")
    hub.create("me/public", private=False)
    hub.create_bucket("me/public", private=False)
    hub.create("me/other")
    hub.commit_files("me/other", {"model.safetensors": b"somebody's", "config.json": b"{}"})


def refused(words: list[str], run_dir: Path) -> Exception:
    """What ends a run's start with these overrides, before anything is done."""

    def start() -> None:
        config = load_config([*words, f"run.dir={run_dir}"])
        url = config.hub.store_url
        own = url and RunStore(open_store(url, 1.0), config.hub.private, takeover=False)
        choose_start(run_dir, config.snapshot.resume, own, timeout=1.0)

    with pytest.raises(USER_MISTAKES) as caught:
        start()
    return caught.value


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_work_is_refused_at_the_start_in_a_sentence(
    near_hub, small, tmp_path, monkeypatch, name
):
    other_repos(near_hub)
    changes, more, part = REFUSALS[name]
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    for variable, value in changes.items():
        monkeypatch.setenv(variable, value)
    error = refused(overrides(small, tmp_path / "run", *more), tmp_path / "run")
    assert exit_code_for(error) == 2
    assert part in str(error)
    if "token" in name:
        assert "hf auth login" in str(error)
        assert "HF_TOKEN" in str(error)
    assert not any(secret in str(error) for secret in SECRETS)
    repo = near_hub.repo("me/other")
    assert repo.read(repo.head, "model.safetensors") == b"somebody's"
    assert len(repo.every_head) == 2
    assert not near_hub.count("preupload")


def test_a_start_without_the_hub_resumes_and_takes_no_repo(near_hub, finished_run, tmp_path):
    newest = runs.snapshot(finished_run, 30)
    hubs.seed(near_hub, runs.snapshot(finished_run, 10))
    near_hub.down()
    here = newest_of_disk_and_store(
        hubs.store(1.0), Start(newest, read_state(newest), ""), newest.parent
    )
    assert (here.folder, here.contents) == (newest, None)
    assert "the Hub cannot be reached" in here.warnings[0]
    # A run without a snapshot cannot know that it is new.
    with pytest.raises(StoreUnreachable, match="it is unknown whether me/run holds a") as caught:
        choose_start(tmp_path / "empty", "auto", hubs.store(1.0))
    assert exit_code_for(caught.value) == 1
    uploads = hubs.uploader(Hub(hubs.REPO, 1.0), unknown=True)
    offer(uploads, newest)
    near_hub.up()
    # It began without knowing of the run that is there: that one keeps the repo.
    assert uploads.flush(300)
    assert uploads.status().off
    assert "another run has uploaded step 10" in " ".join(uploads.messages())
    late = replace(read_state(newest), run_id="new")
    with pytest.raises(SnapshotError, match="holds another run"):
        newest_of_disk_and_store(hubs.store(1.0), Start(newest, late, ""), newest.parent)
    assert hubs.step_of(near_hub) == 10


def test_a_repo_that_was_not_there_is_made_when_the_hub_is_back(near_hub, finished_run):
    near_hub.down()
    begun = choose_start(finished_run, "auto", hubs.store(1.0))
    uploads = hubs.uploader(Hub(hubs.REPO, 1.0), unknown=begun.contents is None)
    offer(uploads, runs.snapshot(finished_run, 10))
    assert not uploads.flush(0)
    assert uploads.status().as_words().startswith("hub not reached yet")
    near_hub.up()
    assert uploads.flush(300), uploads.status()
    hubs.upload_each(uploads, runs.snapshot(finished_run, 30))
    assert hubs.step_of(near_hub) == 30
    assert near_hub.repo(hubs.REPO).private
    hubs.assert_always_whole(near_hub)


@pytest.mark.thorough
def test_the_other_processes_wait_for_the_last_upload(small, tmp_path, hub):
    """As long as hub.flush_seconds, whatever the timeouts of the process group are."""
    hub.create(hubs.REPO)
    hub.fault("commit", "hang", times=3)
    file = runs.rehearsal("ddp_cpu.yaml", tmp_path, 2)
    short = ["run.start_timeout_seconds=8", "run.collective_timeout_seconds=8"]
    words = overrides(small, tmp_path / "run", "snapshot.every=30", *short)
    result = runs.run(runs.launch_command(file, *words), **hub.environment())
    assert_uploaded(hub, result)
