"""The records of a run travel: figures and events. They are untrusted when fetched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import hubs
import runs
from config.compose import load_config
from config.schema import ConfigError
from snapshot.errors import SnapshotError
from snapshot.start import choose_start
from store.fetch import fetch_metrics, read_store
from store.latest import METRICS
from training.reporting import metrics as metrics_file
from training.reporting.metrics import (
    EVENTS,
    LONGEST_TEXT,
    MetricsFile,
    add_fetched,
    metrics_up_to,
    read_metrics,
)
from training.run.records import fetch_missing

GOOD = {"event": "train", "step": 1, "loss": 1.5, "learning_rate": 0.1, "hub_error": None}

SAMPLE = "def one():\n    return '\u4e2d'\n" * 300


def history(path: Path, first: int, last: int, eval_every: int = 250, loss: float = 1.0) -> Path:
    """A metrics file with those steps."""
    with open(path, "w") as opened:
        for step in range(first, last + 1):
            opened.write(json.dumps({"event": "train", "step": step, "loss": loss}) + "\n")
            if step % eval_every == 0:
                opened.write(json.dumps({"event": "eval", "step": step, "loss": loss}) + "\n")
                opened.write(json.dumps({"event": "sample", "step": step, "text": SAMPLE}) + "\n")
    return path


def events_of(path: Path) -> list[dict]:
    """The lines on what happened to a run."""
    return [one for one in map(json.loads, path.read_text().splitlines()) if one["event"] in EVENTS]


def places(path: Path) -> list[tuple[int, str]]:
    return [(record["step"], record["event"]) for record in read_metrics(path)]


def test_an_upload_has_the_metrics_up_to_its_step(tmp_path, monkeypatch):
    path = history(tmp_path / "metrics.jsonl", 1, 510)
    content = metrics_up_to(path, 500)
    assert path.read_bytes().startswith(content)
    lines = list(map(json.loads, content.splitlines()))
    assert lines == [record for record in read_metrics(path) if record["step"] <= 500]
    assert metrics_up_to(tmp_path / "none", 10) == b""
    monkeypatch.setattr(metrics_file, "LARGEST_METRICS_BYTES", 1000)
    with pytest.raises(ConfigError, match="over the limit of an upload"):
        metrics_up_to(path, 500)


@pytest.mark.parametrize(
    ("here", "there"),
    [((1, 20), (1, 30)), ((1, 0), (1, 30)), ((25, 45), (1, 30)), ((1, 20), (11, 45))],
)
def test_fetched_metrics_take_the_place_of_those_of_this_disk(tmp_path, here, there):
    """They are those of the snapshot, which was fetched, too."""
    path = history(tmp_path / "metrics.jsonl", *here, eval_every=10, loss=1.0)
    fetched = history(tmp_path / "fetched", *there, eval_every=10, loss=2.0)
    add_fetched(path, fetched, 30)
    whole = history(tmp_path / "whole", 1, 30, eval_every=10)
    assert places(path) == places(whole)
    own = range(here[0], there[0])
    for record in read_metrics(path):
        if record["event"] == "sample":
            assert record["text"] == SAMPLE
        else:
            assert record["loss"] == 2.0 - (record["step"] in own)


def test_a_step_evaluated_again_after_its_sample_is_merged_once(tmp_path):
    """As where a run resumes with another train.eval_every."""
    path = history(tmp_path / "metrics.jsonl", 1, 10, eval_every=10)
    *others, evaluation, sample = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*others, sample, evaluation]))
    fetched = tmp_path / "fetched"
    fetched.write_bytes(path.read_bytes())
    add_fetched(path, fetched, 30)
    assert path.read_bytes() == fetched.read_bytes()


def test_what_is_no_line_of_fetched_metrics_is_left_out(tmp_path):
    path, fetched = history(tmp_path / METRICS, 1, 5), tmp_path / "fetched"
    before = path.read_bytes()
    fetched.write_bytes(b'{"event": "train", "step": 0, "loss": NaN}\n[]\n\xff\n')
    add_fetched(path, fetched, 30)
    assert path.read_bytes() == before
    with open(fetched, "a") as opened:
        opened.write(json.dumps(GOOD | {"grad/layer 1": 1.0, "hub_error": "\x1b[2J"}) + "\n")
    add_fetched(path, fetched, 30)
    assert [record["grad/layer 1"] for record in read_metrics(path)] == [1.0]
    assert path.read_text().rstrip().isprintable()


def test_events_hold_no_secret_and_have_a_bounded_text(tmp_path):
    metrics = MetricsFile(tmp_path / METRICS, 0, "0123456789")
    metrics.add_event("stop", 3, "see https://u:p@host/x?token=1")
    metrics.add_event("warning", 3, "no room left: '/home/jane doe/my run', step 3")
    metrics.add_event("stop", 3, "x" * 1000)
    first, warning, second = events_of(tmp_path / METRICS)
    assert (first["attempt"], first["step"]) == ("01234567", 3)
    assert first["text"] == "see https://host/x?***"
    assert warning["text"] == "no room left:"
    assert len(second["text"]) == LONGEST_TEXT


def test_events_stay_among_the_figures_of_the_steps(tmp_path):
    """Those up to the next step stay at a resume, and are uploaded with it."""
    path = tmp_path / METRICS
    metrics = MetricsFile(path, 0, "a" * 32)
    metrics.add_event("start", 0)
    metrics.append([{"event": "train", "step": step, "loss": 1.0} for step in (1, 2)])
    metrics.add_event("warning", 4, "said while step 3 was not written yet")
    metrics.append([{"event": "train", "step": step, "loss": 1.0} for step in (3, 4)])
    metrics.add_event("stop", 4)
    assert len(metrics_up_to(path, 2).splitlines()) == 4
    (tmp_path / "fetched").write_bytes(whole := path.read_bytes())
    MetricsFile(path, 2)
    assert [event["event"] for event in events_of(path)] == ["start", "warning"]
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    add_fetched(path, tmp_path / "fetched", 4)
    assert path.read_bytes() == whole


def test_records_that_are_too_large_are_refused(hub, tmp_path, monkeypatch):
    hubs.lead_here(hub, monkeypatch)
    hub.create(hubs.REPO)
    line = json.dumps(GOOD).encode() + b"\n"
    hub.commit_files(hubs.REPO, {METRICS: line})
    contents = read_store(hubs.store().store)
    assert fetch_metrics(contents, tmp_path / "a").read_bytes() == line
    monkeypatch.setattr("store.fetch.LARGEST_METRICS_BYTES", 10)
    with pytest.raises(SnapshotError, match=f"metrics.jsonl of me/run@.* has {len(line)} bytes"):
        fetch_metrics(contents, tmp_path / "b")


def test_metrics_that_cannot_be_fetched_cost_a_warning(
    near_hub, finished_run, tmp_path, monkeypatch
):
    hubs.seed(near_hub, runs.snapshot(finished_run, 10))
    near_hub.commit_files(hubs.REPO, {METRICS: b"{}\n"})
    monkeypatch.setattr("store.fetch.LARGEST_METRICS_BYTES", 2)
    begun = choose_start(tmp_path, "auto", hubs.store())
    said = fetch_missing(load_config([f"run.dir={tmp_path}"]), begun, begun.state)
    assert said.startswith("the metrics of earlier steps could not be fetched from me/run@")
    assert said.endswith("The curves of this run begin at step 11.")


def test_a_repo_tells_the_whole_run(small, tmp_path, hub):
    """Two machines, one after the other, and back to the first."""
    for name, last in (("a", 10), ("b", 20), ("a", 30)):
        words = hubs.words(tmp_path / name, f"train.max_steps={last}", "run.name=travels")
        words += [f"optim.weight_decay={last / 100}"]
        result = runs.train(*small, *words, **hub.environment())
        assert result.returncode == 0, result.stderr
    for name, last in (("b", 20), ("a", 30)):
        assert [r["step"] for r in runs.metrics(tmp_path / name)] == list(range(1, last + 1))
    events = events_of(tmp_path / "a" / METRICS)
    assert [e["step"] for e in events if e["event"] == "start"] == [0, 10, 20]
    assert [e["step"] for e in events if e["event"] == "end"] == [10, 20, 30]
    assert "optim.weight_decay: 0.2 -> 0.3" in [e["text"] for e in events]
    repo = hub.repo(hubs.REPO)
    card = repo.read(repo.head, "README.md").decode()
    assert re.search(r"\| speed \| [\d.]+k? tokens/s, on 1 process, CPU", card)
    content = repo.read(repo.head, METRICS)
    assert content == (tmp_path / "a" / "metrics.jsonl").read_bytes()
    assert str(tmp_path) not in card
    assert str(tmp_path).encode() not in content


def test_a_license_that_the_hub_cannot_show_is_refused():
    with pytest.raises(ValueError, match=r"hub\.license=MIT License must be a license identifier"):
        load_config(["hub.license='MIT License'"])
    assert load_config(["hub.license=cc-by-4.0", "hub.language=en"]).hub.license == "cc-by-4.0"
