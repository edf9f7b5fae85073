"""A cloud's notice that it takes the machine back: a snapshot, its upload, and exit code 75."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

import hubs
import runs
from config.schema import RunConfig
from snapshot.disk.files import step_of
from stopping import ENDLESS, exit_code, only_snapshot, wait_for_steps
from training.run import preemption
from training.run.preemption import CLOUDS, _find_cloud, _has_notice
from training.run.signals import PREEMPTED

QUIET = {"aws": None, "gcp": "FALSE", "azure": json.dumps({"Events": []})}
"""What each address answers without a notice; None is 404."""
NOTICES = {
    "aws": json.dumps({"action": "terminate", "time": "2026-11-23T05:00:00Z"}),
    "gcp": "TRUE",
    "azure": json.dumps({"Events": [{"EventType": "Preempt", "Resources": ["a", "i-0123"]}]}),
}


OTHER = json.dumps({"Events": [{"EventType": "Preempt", "Resources": ["another machine"]}]})


class Metadata(ThreadingHTTPServer):
    """The metadata address of one cloud, with the headers that it asks for."""

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.cloud, self.answer = CLOUDS[name], QUIET[name]
        self.asked = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        is_token = self.path == "/latest/api/token" and self.server.cloud.token_path
        lifetime = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.reply("a token" if is_token and lifetime else None)

    def do_GET(self) -> None:
        cloud = self.server.cloud
        allowed = all(self.headers[name] == value for name, value in cloud.headers.items())
        if cloud.token_path:
            allowed = self.headers["X-aws-ec2-metadata-token"] == "a token"
        if not allowed or self.path not in (cloud.path, cloud.known_by):
            self.reply(None)
        elif self.path == cloud.path:
            self.server.asked += 1
            self.reply(self.server.answer)
        else:
            self.reply("i-0123")

    def reply(self, text: str | None) -> None:
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=list(CLOUDS))
def metadata(request):
    with Metadata(request.param) as server:
        yield server
        server.shutdown()


def test_each_cloud_is_found_and_its_notice_is_understood(metadata):
    cloud = _find_cloud(metadata.address)
    assert cloud is metadata.cloud
    assert not _has_notice(cloud, metadata.address)
    metadata.answer = next(NOTICES[name] for name, one in CLOUDS.items() if one is cloud)
    assert _has_notice(cloud, metadata.address)
    for wrong in ("", "{", "[]", "null", '{"Events": [1]}', OTHER, '{"action": "none"}'):
        metadata.answer = wrong
        assert not _has_notice(cloud, metadata.address)


def test_an_unknown_cloud_or_a_hanging_address_is_no_notice(monkeypatch):
    monkeypatch.setattr(preemption, "SEARCH_SECONDS", 0.1)
    monkeypatch.setattr(preemption, "EVERY_SECONDS", 0.1)
    monkeypatch.setattr(preemption, "ANSWER_SECONDS", 0.2)
    assert _find_cloud("http://127.0.0.1:9") is None
    with Metadata("gcp") as server:
        server.shutdown()  # it listens, and never answers
        assert not _has_notice(CLOUDS["gcp"], server.address)


@pytest.mark.parametrize(
    ("answers", "told"),
    [([True], "stop"), ([None, True], "stop"), ([False, None, True], "notice")],
)
def test_a_notice_is_new_only_after_an_answer_without_one(monkeypatch, answers, told):
    """An attempt that begins within a notice does not know how much of it is left."""
    left, happened = list(answers), []
    monkeypatch.setattr(preemption, "EVERY_SECONDS", 0)
    monkeypatch.setattr(preemption, "_has_notice", lambda *_: left.pop(0))
    signals = SimpleNamespace(
        cause=None,
        stop=lambda cause: happened.append(("stop", cause)),
        notice=lambda cause: happened.append(("notice", cause)),
    )
    preemption._watch(RunConfig(preemption_notice="aws"), signals)
    assert (happened, left) == ([(told, PREEMPTED)], [])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["auto", pytest.param("gcp", marks=pytest.mark.slow)])
def test_a_notice_ends_a_run_with_a_snapshot_and_it_resumes(small, tmp_path, hub, kind):
    """Within the half minute that Google gives, the upload included; no step is lost."""
    run_dir = tmp_path / "run"
    with Metadata("gcp") as server:
        words = [
            *small,
            *ENDLESS,
            "optim.min_learning_rate=0.003",  # the same at each step, so a shorter run has its bits
            f"run.preemption_notice={kind}",
            f"run.metadata_address={server.address}",
            *hubs.words(run_dir),
        ]
        with runs.started(runs.command(*words), **hub.environment()) as process:
            runs.wait_until(lambda: server.asked > 1, process)
            wait_for_steps(process, run_dir)
            server.answer, told = NOTICES["gcp"], time.monotonic()
            out, errors = process.communicate(timeout=30)
            seconds = time.monotonic() - told
        server.shutdown()
    assert process.returncode == exit_code(run_dir) == 75, errors
    assert "a preemption notice" in out
    place = only_snapshot(run_dir)
    assert hubs.step_of(hub) == step_of(place)
    print(f"on the Hub and ended {seconds:.1f} s after the notice")
    launch = partial(runs.train, **hub.environment())
    here = [*words, "run.preemption_notice=none"]
    alone = [*here, "hub.repo_id=null"]
    steps = step_of(place) + 5
    first = launch(*alone, f"train.max_steps={steps}", f"run.dir={tmp_path / 'whole'}")
    assert first.returncode == 0, first.stderr
    rest = launch(*here, f"train.max_steps={steps}")
    assert rest.returncode == 0, rest.stderr
    runs.assert_same_bits(runs.snapshot(tmp_path / "whole", steps), runs.snapshot(run_dir, steps))
