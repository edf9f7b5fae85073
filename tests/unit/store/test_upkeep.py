"""Milestones, the best snapshot, and what a repo stores: only what is needed, and all of that."""

from __future__ import annotations

import httpx2
import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import hf_raise_for_status
from transformers import AutoModelForCausalLM

import hubs
import runs
from config.compose import load_config
from config.schema import ConfigError
from loopback_hub import LoopbackHub
from store.attempt import Card
from store.hub import Hub
from store.latest import METRICS
from training.reporting.metrics import read_metrics


def assert_refs_whole(hub: LoopbackHub) -> None:
    """All that main, the tags and the other branches list is stored."""
    repo = hub.repo(hubs.REPO)
    for revision in (*repo.branches, *repo.tags):
        for path, entry in repo.files(revision).items():
            stored = len(repo.content(entry))
            assert stored == entry.size, (revision, path)


def test_contents_of_pruned_snapshots_go_and_history_stays(near_hub, repo, snapshot_of):
    uploads = hubs.uploader(keep=2)
    size = sum(path.stat().st_size for path in snapshot_of(1).iterdir())
    for step in range(1, 8):
        hubs.upload_each(uploads, snapshot_of(step))
        assert repo.bytes_of_large() < 2 * size
        assert_refs_whole(near_hub)
    assert len(repo.every_head) == 1 + 7
    assert hubs.steps_at_head(repo) == [6, 7]
    assert uploads.messages() == []
    hubs.assert_always_whole(near_hub)


def test_what_a_tag_a_branch_or_a_pull_request_holds_is_not_deleted(near_hub, repo, snapshot_of):
    uploads = hubs.uploader(keep=1)
    hubs.upload_each(uploads, snapshot_of(1))
    HfApi().create_tag(hubs.REPO, tag="cited")
    hubs.upload_each(uploads, snapshot_of(2))
    HfApi().create_branch(hubs.REPO, branch="experiment")
    hubs.upload_each(uploads, snapshot_of(3))
    HfApi().create_branch(hubs.REPO, branch="pr/1")  # what the loopback hub lists as one
    hubs.upload_each(uploads, snapshot_of(4))
    assert near_hub.count("lfs-delete") == 0
    hubs.upload_each(uploads, snapshot_of(5))
    assert near_hub.count("lfs-delete") == 1
    assert_refs_whole(near_hub)
    assert uploads.messages() == []


def test_a_card_that_the_hub_refuses_costs_only_the_card(near_hub, repo, snapshot_of, monkeypatch):
    real = HfApi.create_commit

    def create_commit(self, repo_id, operations, **named):
        if any(one.path_in_repo == "README.md" for one in operations):
            request = httpx2.Request("POST", "https://hub.example.org/api/models/me/run/commit")
            answer = httpx2.Response(400, json={"error": "unknown license"}, request=request)
            hf_raise_for_status(answer)
        return real(self, repo_id, operations, **named)

    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    uploads = hubs.uploader()
    hubs.upload_each(uploads, snapshot_of(1), snapshot_of(2))
    assert hubs.steps_at_head(repo) == [1, 2]
    assert "README.md" not in repo.files(repo.head)
    (said,) = uploads.messages()
    assert said.startswith("README.md is not uploaded: the Hub refuses (HTTP 400: unknown license")
    assert said.endswith("check hub.license and hub.language.")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"status": 503}, None),
        ({"status": 403, "times": None}, "still use storage of me/run"),
        ({"status": 404, "times": None}, "HfApi().super_squash_history(repo) frees it"),
    ],
    ids=["transient", "refused", "unknown"],
)
@pytest.mark.parametrize("endpoint", ["lfs-delete", "refs"])
def test_a_deletion_that_fails_costs_no_upload(
    near_hub, repo, snapshot_of, endpoint, fault, message
):
    uploads = hubs.uploader(keep=1)
    near_hub.fault(endpoint, "status", **fault)
    hubs.upload_each(uploads, *map(snapshot_of, range(1, 5)))
    assert hubs.step_of(near_hub) == 4
    assert_refs_whole(near_hub)
    said = uploads.messages()
    if message is None:  # the next one deletes all
        head = {entry.sha256: entry.size for entry in repo.files("main").values() if entry.is_lfs}
        assert repo.bytes_of_large() == sum(head.values())
        assert said == []
    else:
        assert len([one for one in said if message in one]) == 1


def test_nothing_is_deleted_when_another_attempt_committed(
    near_hub, repo, snapshot_of, monkeypatch
):
    uploads = hubs.uploader(keep=1)
    hubs.upload_each(uploads, snapshot_of(1))
    commit = Hub._commit

    def followed(self, *arguments):
        made = commit(self, *arguments)
        near_hub.commit_files(hubs.REPO, {"notes.txt": b"by somebody else"})
        return made

    monkeypatch.setattr(Hub, "_commit", followed)
    hubs.upload_each(uploads, snapshot_of(2))
    assert near_hub.count("lfs-delete") == 0


@pytest.mark.thorough
def test_every_milestone_is_uploaded_and_stays(near_hub, repo, snapshot_of, tmp_path):
    """Uploads are slower than the run."""
    hung = near_hub.fault("commit", "hang", times=None)
    uploads = hubs.uploader(Hub(hubs.REPO, 1.0), keep=1, milestone_every=10)
    for step in range(2, 51, 2):
        uploads.offer(snapshot_of(step), Card(f"# {step}\n"))
        near_hub.wait_for(lambda: hung.hits)
    pending = {int(folder.name[5:]) for folder in uploads.pending_folders()}
    assert pending >= {10, 20, 30, 40, 50}
    near_hub.clear_faults()
    assert uploads.flush(300), uploads.status()
    hubs.upload_each(uploads, *map(snapshot_of, range(51, 57)))
    assert hubs.steps_at_head(repo) == [10, 20, 30, 40, 50, 56]
    assert list(repo.tags) == [f"step-{step:08d}" for step in (10, 20, 30, 40, 50)]
    assert_refs_whole(near_hub)
    for name in repo.tags:
        model = AutoModelForCausalLM.from_pretrained(hubs.REPO, revision=name)
        alone = AutoModelForCausalLM.from_pretrained(tmp_path / "made" / "snapshots" / name)
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert one.equal(other)


@pytest.mark.parametrize("kind", ["", "status", "lost-answer", "reset"])
def test_a_milestone_stays_without_its_tag_and_moves_no_other(near_hub, repo, snapshot_of, kind):
    HfApi().create_tag(hubs.REPO, tag="step-00000002")  # somebody else's
    before = repo.tags["step-00000002"]
    if kind:
        near_hub.fault("tag", kind, times=None, **({"status": 403} if kind == "status" else {}))
    uploads = hubs.uploader(keep=1, milestone_every=2)
    hubs.upload_each(uploads, *map(snapshot_of, (1, 2, 3, 4, 5)))
    assert hubs.steps_at_head(repo) == [2, 4, 5]
    assert repo.tags["step-00000002"] == before
    assert ("step-00000004" in repo.tags) == (kind in ("", "lost-answer"))
    assert uploads.messages() == []


def test_a_milestone_that_is_no_snapshot_is_refused():
    message = r"hub\.milestone_every=25 is not a multiple of snapshot\.every=10.*: 20 or 30"
    with pytest.raises(ConfigError, match=message):
        load_config(["snapshot.every=10", "hub.milestone_every=25"])


@pytest.mark.thorough
def test_the_best_snapshot_is_the_one_with_the_lowest_loss(small, tmp_path, hub):
    """Over a restart and a change of machine, while the held-out loss goes up."""
    words = [*small, "snapshot.keep_best=true", "snapshot.keep=2", "snapshot.every=5"]
    words += ["train.eval_every=5", "optim.warmup_steps=0", "optim.min_learning_rate=0.001"]
    for name, last, rate in (("here", 20, 0.02), ("here", 40, 2.0), ("there", 50, 2.0)):
        more = hubs.words(tmp_path / name, f"train.max_steps={last}", "run.name=best")
        more.append(f"optim.learning_rate={rate}")
        result = runs.train(*words, *more, **hub.environment())
        assert result.returncode == 0, result.stderr
        losses = {
            record["loss"]: record["step"]
            for record in read_metrics(tmp_path / name / METRICS)
            if record["event"] == "eval"
        }
        best = losses[min(losses)]
        repo = hub.repo(hubs.REPO)
        assert hubs.latest(hub)["best_step"] == best
        assert hubs.latest(hub)["best_loss"] == min(losses)
        assert best in hubs.steps_at_head(repo)
        assert f"`snapshots/step-{best:08d}-" in repo.read("main", "README.md").decode()
    assert 5 < best <= 20  # or the test would show little
    assert len(list((tmp_path / "here" / "snapshots").iterdir())) == 3
