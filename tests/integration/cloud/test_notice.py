"""A cloud's notice that it takes the machine back: a snapshot, its upload, and exit code 75.

The clouds are addresses on this machine; launchers and runs are real.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import hubs
import runs
from cloud import notice
from cloud.notice import CLOUDS, has_notice
from snapshot.disk.folder import step_of
from stopping import ENDLESS, only_snapshot, wait_for_steps

QUIET = {"aws": None, "gcp": "FALSE", "azure": json.dumps({"Events": []})}
"""What each address answers without a notice; None is 404."""
NOTICES = {
    "aws": json.dumps({"action": "terminate", "time": "2026-11-23T05:00:00Z"}),
    "gcp": "TRUE",
    "azure": json.dumps({"Events": [{"EventType": "Preempt", "Resources": ["a", "i-0123"]}]}),
}


ASKED = {
    "aws": ("X-aws-ec2-metadata-token", "a token", "/latest/meta-data/spot/instance-action"),
    "gcp": ("Metadata-Flavor", "Google", "/computeMetadata/v1/instance/preempted"),
    "azure": ("Metadata", "true", "/metadata/scheduledevents?api-version=2020-07-01"),
}
"""The header, its value, and the page of each notice."""
OTHER = json.dumps({"Events": [{"EventType": "Preempt", "Resources": ["another machine"]}]})


class Metadata(ThreadingHTTPServer):
    """The metadata address of one cloud, with the headers that it asks for."""

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.cloud, self.answer = name, QUIET[name]
        self.asked = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        is_token = self.path == "/latest/api/token" and self.server.cloud == "aws"
        lifetime = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.reply("a token" if is_token and lifetime else None)

    def do_GET(self) -> None:
        header, value, page = ASKED[self.server.cloud]
        if self.headers[header] != value:
            self.reply(None)
        elif self.path == page:
            self.server.asked += 1
            self.reply(self.server.answer)
        else:
            is_name = self.path.startswith("/metadata/instance/compute/name?")
            self.reply("i-0123" if is_name else None)

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


def test_each_cloud_s_notice_is_understood_and_no_other(metadata):
    cloud = metadata.cloud
    assert not has_notice(cloud, metadata.address)
    metadata.answer = NOTICES[cloud]
    assert [name for name in CLOUDS if has_notice(name, metadata.address)] == [cloud]
    for wrong in ("", "{", "[]", "null", '{"Events": [1]}', OTHER, '{"action": "none"}'):
        metadata.answer = wrong
        assert not has_notice(cloud, metadata.address)


def test_an_address_that_is_gone_or_hangs_is_no_notice(monkeypatch):
    monkeypatch.setattr(notice, "ANSWER_SECONDS", 0.2)
    assert not any(has_notice(cloud, "http://127.0.0.1:9") for cloud in CLOUDS)
    with Metadata("gcp") as server:
        server.shutdown()  # it listens, and never answers
        assert not has_notice("gcp", server.address)


TRAINS = "import time; print(1, flush=True); time.sleep(60)"
CATCHES = f"import signal; signal.signal(signal.SIGUSR1, lambda *_: exit(7)); {TRAINS}"
ATTEMPTS = """
import pathlib, subprocess, sys, threading
from cloud import attempts
launches = "import subprocess, sys; exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
command = [sys.executable, "-c", launches, sys.argv[1]]
run = attempts.Attempts(command, pathlib.Path(sys.argv[2]))
threading.Thread(target=run.watch, args=(["gcp"], sys.argv[3]), daemon=True).start()
exit(run.run(5, (0,)))
"""


@pytest.mark.parametrize("worker", [CATCHES, TRAINS])
def test_a_machine_that_is_taken_back_ends_with_the_code_for_another(tmp_path, worker):
    """Also where the run only just begins, and dies of the signal."""
    with Metadata("gcp") as server:
        words = [sys.executable, "-c", ATTEMPTS, worker, str(tmp_path), server.address]
        with runs.started(words, forked=False) as process:
            assert process.stdout.readline() == "1\n"
            server.answer = NOTICES["gcp"]  # an earlier one ends the launcher before its worker
            assert process.wait(20) == 75
            assert "next attempt" not in process.stdout.read()
        server.shutdown()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config", ["cpu.yaml", pytest.param("ddp_cpu.yaml", marks=pytest.mark.slow)]
)
def test_a_notice_stops_a_run_with_a_snapshot(small, tmp_path, hub, config):
    """Within the half minute that Google gives, the upload included."""
    run_dir, said = tmp_path / "run", tmp_path / "said"
    launch = runs.launch_command(config, *small, *ENDLESS, *hubs.words(run_dir))
    train = str(runs.ROOT / "train.py")
    at = launch.index("--config_file")
    launch = ["train.py" if word == train else word for word in launch[at:]]
    with Metadata("gcp") as server:
        watched = ["--notice=auto", f"--notice-address={server.address}", "--restarts=5"]
        told = [sys.executable, "-m", "cloud.attempts", *watched, *launch]
        with runs.started(told, into=said, forked=False, **hub.environment()) as process:
            runs.wait_until(lambda: server.asked > 1, process)
            wait_for_steps(process, run_dir)
            server.answer, begun = NOTICES["gcp"], time.monotonic()
            assert process.wait(60) == 75, said.read_text()
            print(f"on the Hub and ended {time.monotonic() - begun:.1f} s after the notice")
        server.shutdown()
    for words in ("the cloud takes this machine back", "stopped   by SIGUSR1"):
        assert words in said.read_text()
    assert "next attempt" not in said.read_text()
    assert hubs.step_of(hub) == step_of(only_snapshot(run_dir))
