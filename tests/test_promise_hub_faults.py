"""Promise 4: the Hub never hurts training. Every fault that a Hub can have, while a run uploads.

Whatever happens, training ends with exit code 0, the newest snapshot is on the Hub as soon as the
Hub is back, and no commit ever held half a snapshot.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import hubs
import runs
from loopback_hub import LoopbackHub

STEPS = 30
SECRETS = ("hf_loopbackOfMeMayWrite", "signature=")


def rarely(*values: str) -> list:
    """Parameters of slow tests."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


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


LIMIT = {"ratelimit": '"api";r=0;t=1', "ratelimit-policy": '"fixed window";"api";q=500;w=300'}
FAULTS = {
    "connections refused": [("*", "refuse", {"after": 12, "times": 8})],
    "a hang before the contents": [("preupload", "hang", {"after": 1})],
    "a hang in the contents": [("put", "hang", {"after": 1})],
    "a hang of the commit": [("commit", "hang", {"after": 1})],
    "a hang of the head": [("info", "hang", {"after": 2})],
    "a reset in the middle of a content": [("put", "reset", {"after": 1})],
    "a reset in the middle of the commit": [("commit", "reset", {"after": 1})],
    "500 before the commit": [("commit", "status", {"status": 500, "times": 2})],
    "503 before the commit": [("commit", "status", {"status": 503})],
    "a hang of the listing": [("tree", "hang", {"after": 1})],
    "a wait of ten years asked for": [
        ("batch", "status", {"status": 429, "headers": {"Retry-After": "315360000"}})
    ],
    "500 on the listing": [("tree", "status", {"status": 500, "after": 1})],
    "the answer to a commit lost": [("commit", "lost-answer", {"times": 2})],
    "a commit applied and answered with 500": [("commit", "lost-answer", {"status": 500})],
    "409, another commit is running": [("commit", "status", {"status": 409, "times": 2})],
    "412, a stale parent": [("commit", "status", {"status": 412, "times": 2})],
    "429 with a time, on the commit": [
        ("commit", "status", {"status": 429, "headers": {"Retry-After": "1"}, "times": 2})
    ],
    "429 without a time, on the commit": [("commit", "status", {"status": 429})],
    "429 on the contents": [("batch", "status", {"status": 429, "headers": LIMIT})],
    "403, the storage is full": [
        ("commit", "status", {"status": 403, "message": "quota exceeded", "after": 1})
    ],
    "404 on the contents": [("preupload", "status", {"status": 404, "after": 1})],
    "a stale head on reads": [("info", "stale-head", {"after": 2, "times": 3})],
    "a squash that is unknown": [("squash", "status", {"status": 404, "times": None})],
    "a squash that fails": [("squash", "status", {"status": 503})],
    "a squash whose answer is lost": [("squash", "lost-answer", {})],
    "a card that cannot be judged": [("validate-yaml", "status", {"status": 503})],
    "a Hub that knows no cards": [("validate-yaml", "status", {"status": 404, "times": None})],
}


OFTEN = {
    "connections refused",
    "a hang in the contents",
    "a hang of the listing",
    "a reset in the middle of the commit",
    "500 before the commit",
    "the answer to a commit lost",
    "412, a stale parent",
    "429 with a time, on the commit",
    "403, the storage is full",
    "a stale head on reads",
    "a squash that is unknown",
    "a Hub that knows no cards",
}
"""One of each kind; the others are slow ones."""


@pytest.mark.parametrize("name", [*sorted(OFTEN), *rarely(*sorted(set(FAULTS) - OFTEN))])
def test_a_fault_costs_no_step_and_no_snapshot(small, tmp_path, hub, name):
    faults = [hub.fault(endpoint, kind, **more) for endpoint, kind, more in FAULTS[name]]
    more = ["hub.squash_every=2"] if "squash" in name else []
    result = runs.train(*overrides(small, tmp_path / "run", *more), **hub.environment())
    assert all(fault.hits for fault in faults)
    assert_uploaded(hub, result)
    assert len(runs.losses(tmp_path / "run")) == STEPS


def test_500_on_a_part_of_a_large_content(small, tmp_path, hub):
    hub.multipart_above, hub.part_bytes = 50_000, 20_000
    part = hub.fault("part", "status", status=500, after=1)
    complete = hub.fault("complete", "status", status=500, after=1)
    result = runs.train(*overrides(small, tmp_path / "run"), **hub.environment())
    assert_uploaded(hub, result)
    assert part.hits
    assert complete.hits
    assert hub.count("part") > 3


@pytest.mark.parametrize(
    ("endpoint", "kind"),
    [
        ("blob-get", "truncated"),
        ("resolve-get", "corrupted"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("blob-get", "corrupted"),
                ("blob-get", "reset"),
                ("resolve-head", "hang"),
                ("info", "refuse"),
                ("tree", "reset"),
            )
        ),
    ],
)
def test_a_download_that_fails_once_is_made_again(small, tmp_path, hub, endpoint, kind):
    words = overrides(small, tmp_path / "a", "train.max_steps=10")
    assert runs.train(*words, **hub.environment()).returncode == 0
    fault = hub.fault(endpoint, kind)
    result = runs.train(*overrides(small, tmp_path / "b"), **hub.environment())
    assert fault.hits
    assert_uploaded(hub, result)
    assert runs.metrics(tmp_path / "b")[0]["step"] == 11


def test_downloads_that_are_never_whole_leave_the_disk_clean(small, tmp_path, hub):
    words = overrides(small, tmp_path / "a", "train.max_steps=20")
    assert runs.train(*words, **hub.environment()).returncode == 0
    hub.fault("blob-get", "corrupted", times=None)
    result = runs.train(*overrides(small, tmp_path / "b"), **hub.environment())
    assert result.returncode == 2
    assert f"none of the snapshots in {hubs.REPO}@" in result.stderr
    assert "safetensors has changed" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "b" / "snapshots").iterdir())


def test_an_expired_token_in_the_middle_of_a_run(small, tmp_path, hub):
    token = hub.default_token
    seen = threading.Event()

    def expire_and_renew() -> None:
        hub.wait_for(lambda: hub.count("commit") >= 1, 60)
        hub.revoke(token)
        hub.wait_for(lambda: any(one.status == 401 for one in hub.requests), 60)
        hub.restore(token)
        seen.set()

    beside = threading.Thread(target=expire_and_renew)
    beside.start()
    more = ["train.max_steps=3000", "snapshot.every=100", "train.eval_every=3000"]
    result = runs.train(*overrides(small, tmp_path / "run", *more), **hub.environment())
    beside.join()
    assert seen.is_set()
    assert "warning: uploads wait: the Hub does not accept the token (HTTP 401" in result.stdout
    assert "hf auth login" in result.stdout
    assert_uploaded(hub, result, 3000)
    # What is behind is visible: step, age and the last error.
    behind = [record for record in runs.metrics(tmp_path / "run") if record.get("hub_error")]
    assert behind
    assert "401" in behind[0]["hub_error"]
    assert behind[0]["hub_step"] >= 100
    assert behind[0]["hub_age_seconds"] >= 0
    assert "old, last error: HTTP 401" in result.stdout
    assert_no_secrets(result, tmp_path / "run")
    repo = hub.repo(hubs.REPO)
    for commit in repo.every_head:
        for path in repo.files(commit):
            assert token.encode() not in repo.read(commit, path)


def test_a_token_that_stays_expired_costs_no_minute_at_the_end(small, tmp_path, hub):
    hub.fault("info", "status", status=401, after=2, times=None)
    words = overrides(small, tmp_path / "run", "hub.flush_seconds=100000")
    result = runs.train(*words, **hub.environment())
    assert result.returncode == 0, result.stderr
    assert "The same command uploads it at its next start" in result.stdout


@pytest.mark.parametrize("kind", ["parent-500", *rarely("none", "ignore-parent")])
def test_somebody_edits_the_repo_meanwhile(small, tmp_path, hub, kind):
    if kind != "none":
        hub.fault("commit", kind, times=None)

    def edit() -> None:
        hub.wait_for(lambda: hub.count("commit") >= 1, 60)
        hub.commit_files(hubs.REPO, {"NOTES.md": b"mine"})

    beside = threading.Thread(target=edit)
    beside.start()
    result = runs.train(*overrides(small, tmp_path / "run"), **hub.environment())
    beside.join()
    assert_uploaded(hub, result)
    repo = hub.repo(hubs.REPO)
    assert repo.read(repo.head, "NOTES.md") == b"mine"


@pytest.mark.parametrize("kind", ["none", *rarely("parent-500", "ignore-parent")])
def test_of_two_runs_on_one_repo_exactly_one_keeps_it(small, tmp_path, hub, kind):
    if kind != "none":
        hub.fault("commit", kind, times=None)
    hub.create(hubs.REPO)
    longer = ["train.max_steps=1500", "snapshot.every=100", "train.eval_every=1500"]
    with (
        runs.started(
            runs.command(*overrides(small, tmp_path / "a", *longer)), **hub.environment()
        ) as one,
        runs.started(
            runs.command(*overrides(small, tmp_path / "b", *longer)), **hub.environment()
        ) as other,
    ):
        printed = [process.communicate(timeout=120)[0] for process in (one, other)]
        assert one.returncode == other.returncode == 0, printed
    lost = ["another run has uploaded step" in out for out in printed]
    kept = [f"{hubs.REPO} has step 1500" in out for out in printed]
    if lost == [False, False]:  # the second began when the first had its repo: it was refused
        raise AssertionError(printed)
    assert sorted(lost) == [False, True], printed
    assert kept == [not one for one in lost]
    assert "hub.takeover=true" in printed[lost.index(True)]
    for name in ("a", "b"):
        assert runs.snapshot(tmp_path / name, 1500).is_dir()
    hubs.assert_always_whole(hub)
    assert len({run["run_id"] for run in all_latest(hub)[-3:]}) == 1


def all_latest(hub: LoopbackHub) -> list[dict]:
    """latest.json of every head that had one."""
    repo = hub.repo(hubs.REPO)
    heads = [commit for commit in repo.every_head if "latest.json" in repo.files(commit)]
    return [json.loads(repo.read(commit, "latest.json")) for commit in heads]


def test_takeover_replaces_what_another_run_has_there(small, tmp_path, hub):
    words = overrides(small, tmp_path / "a", "train.max_steps=20")
    assert runs.train(*words, **hub.environment()).returncode == 0
    never = overrides(small, tmp_path / "b", "snapshot.resume=never", "train.max_steps=10")
    refused = runs.train(*never, **hub.environment())
    assert refused.returncode == 2
    assert f"hub.repo_id={hubs.REPO} holds a run, at step 20" in refused.stderr
    taken = runs.train(*never, "hub.takeover=true", **hub.environment())
    assert_uploaded(hub, taken, 10)
    assert hubs.steps_at_head(hub.repo(hubs.REPO)) == [10]
    # The first one's next start says whose the repo is.
    back = runs.train(*words, **hub.environment())
    assert back.returncode == 2
    assert "holds another run" in back.stderr


@pytest.mark.parametrize(
    "kills", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_killed_while_uploading_nothing_is_half_there_and_nothing_goes_twice(
    small, tmp_path, hub, kills
):
    hub.latency = (0.0, 0.03)
    chosen = random.Random(4)
    last, hits = 10 * (kills + 1), 0
    words = overrides(small, tmp_path / "run", f"train.max_steps={last}", "hub.flush_seconds=60")
    for number in range(kills):
        # Another ten steps each time, so that there is something to upload.
        mine = [*words, f"train.max_steps={10 * (number + 1)}"]
        until = len(hub.requests) + chosen.randrange(6, 20)
        with runs.started(runs.command(*mine), **hub.environment()) as process:
            while process.poll() is None and len(hub.requests) < until:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.005)
            hits += process.poll() is None
        hubs.assert_always_whole(hub)
    assert hits >= kills * 0.8
    result = runs.train(*words, **hub.environment())
    assert_uploaded(hub, result, last)
    assert set(hub.uploaded.values()) == {1}
    assert runs.metrics(tmp_path / "run")[-1]["step"] == last


def test_a_hundred_snapshots_stay_within_four(small, tmp_path, hub):
    """In one process: a hundred snapshots, each uploaded, with hub.keep=3."""
    assert runs.train(*small, f"run.dir={tmp_path / 'run'}").returncode == 0
    script = tmp_path / "hundred.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(runs.ROOT)!r})\n"
        f"sys.path.insert(0, {str(runs.ROOT / 'tests')!r})\n"
        "import many_snapshots\n"
        f"many_snapshots.upload({str(runs.snapshot(tmp_path / 'run', 30))!r}, {hubs.REPO!r})\n"
    )
    done = runs.run([sys.executable, str(script)], **hub.environment())
    assert done.returncode == 0, done.stderr
    repo = hub.repo(hubs.REPO)
    assert hubs.steps_at_head(repo) == [98, 99, 100]
    folder = runs.snapshot(tmp_path / "run", 30)
    size = sum(path.stat().st_size for path in folder.iterdir())
    most = 4 * size + sum((folder / name).stat().st_size for name in hubs.WITHOUT_OPTIMIZER)
    for commit in repo.every_head:
        assert repo.referenced_bytes(commit) < most
    assert len(repo.commits) <= 10  # squashed now and then
    print(f"{repo.referenced_bytes(repo.head) / size:.2f} snapshots, root copy included")
    hubs.assert_always_whole(hub)


REFUSALS = {
    "no token": ({"HF_TOKEN": ""}, [], "needs a token, and there is none"),
    "an unknown token": ({"HF_TOKEN": "hf_wrong"}, [], "does not accept the token"),
    "a token that may only read": ({"HF_TOKEN": "hf_read"}, [], "is read-only"),
    "somebody else's name": ({}, ["hub.repo_id=you/run"], "the Hub refuses (HTTP 403"),
    "a public repo": ({}, ["hub.repo_id=me/public"], "me/public is a public repo"),
    "a repo of something else": ({}, ["hub.repo_id=me/other"], "holds config.json"),
    "no repo's name": ({}, ["hub.repo_id=run"], "is not of the form owner/name"),
    "a repo that is not there": (
        {},
        ["snapshot.resume=me/none", "hub.repo_id=null"],
        "snapshot.resume=me/none: there is no repo me/none",
    ),
    "a revision that is not there": (
        {},
        ["snapshot.resume=me/public@abc", "hub.repo_id=null"],
        "has no revision abc",
    ),
    "a repo without a snapshot": (
        {},
        ["snapshot.resume=me/public", "hub.repo_id=null"],
        "no snapshot in me/public",
    ),
}


def test_what_cannot_work_is_refused_at_the_start_in_a_sentence(small, tmp_path, hub):
    hub.add_token("hf_read", role="read")
    hub.create("me/public", private=False)
    hub.create("me/other")
    hub.commit_files("me/other", {"model.safetensors": b"somebody's", "config.json": b"{}"})
    for number, (name, (changes, more, part)) in enumerate(REFUSALS.items()):
        words = overrides(small, tmp_path / str(number), *more)
        environment = hub.environment() | {"HF_HOME": str(tmp_path / "none")} | changes
        result = runs.train(*words, **environment)
        assert result.returncode == 2, (name, result.stdout, result.stderr)
        assert part in result.stderr, name
        assert "Traceback" not in result.stderr
        assert "step 1/" not in result.stdout
        if "token" in name:
            assert "hf auth login" in result.stderr
            assert "HF_TOKEN" in result.stderr
        assert_no_secrets(result)
    repo = hub.repo("me/other")
    assert repo.read(repo.head, "model.safetensors") == b"somebody's"
    public = overrides(small, tmp_path / "p", "hub.repo_id=me/public", "hub.private=false")
    assert runs.train(*public, **hub.environment()).returncode == 0
    assert hubs.step_of(hub, "me/public") == STEPS


def test_with_a_snapshot_here_a_start_needs_no_hub_and_without_it_does(small, tmp_path, hub):
    words = overrides(small, tmp_path / "run", "train.max_steps=10")
    assert runs.train(*words, **hub.environment()).returncode == 0
    hub.down()
    on = runs.train(*words, "train.max_steps=20", "hub.flush_seconds=0", **hub.environment())
    assert on.returncode == 0, on.stderr
    expired = runs.train(
        *words,
        "train.max_steps=30",
        "hub.flush_seconds=0",
        **hub.environment() | {"HF_TOKEN": ""},
    )
    assert expired.returncode == 0, expired.stderr
    assert "warning: hub.repo_id=me/run needs a token" in expired.stdout
    shutil.rmtree(tmp_path / "run")
    refused = runs.train(*words, **hub.environment())
    assert refused.returncode == 1  # nobody's mistake: to be started again
    assert "it is unknown whether me/run holds a snapshot" in refused.stderr
    new = runs.train(*words, "snapshot.resume=never", "hub.flush_seconds=0", **hub.environment())
    assert new.returncode == 0, new.stderr
    hub.up()
    # It began without knowing of the run that is there: that one keeps the repo.
    late = runs.train(*words, "train.max_steps=40", **hub.environment())
    assert late.returncode == 2
    assert "holds another run" in late.stderr
    assert hubs.step_of(hub) == 10


@pytest.mark.slow
def test_a_run_that_began_without_the_hub_finds_it_later(small, tmp_path, hub):
    """The repo is made when the Hub is back, in the middle of the run."""
    hub.down()
    longer = ["train.max_steps=3000", "snapshot.every=100", "train.eval_every=3000"]
    words = overrides(small, tmp_path / "run", "snapshot.resume=never", *longer)
    with runs.started(runs.command(*words), **hub.environment()) as process:
        for line in process.stdout:
            if "step 300/" in line:
                break
        hub.up()
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"{hubs.REPO} has step 3000" in out
    assert hub.repo(hubs.REPO).private
    hubs.assert_always_whole(hub)
