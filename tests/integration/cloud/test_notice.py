"""A cloud's notice that it takes the machine back: a snapshot, its upload, and exit code 75.

The clouds are addresses on this machine; launchers and runs are real.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

import hubs
import runs
from cloud import notice
from cloud.notice import CLOUDS, find_cloud, has_notice, parse, tell
from snapshot.disk.files import step_of
from stopping import ENDLESS, exit_code, only_snapshot, wait_for_steps
from training import exits

MODULE = [sys.executable, "-m", "cloud.notice"]
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
        is_token = self.path == "/latest/api/token" and not self.server.cloud.headers
        lifetime = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.reply("a token" if is_token and lifetime else None)

    def do_GET(self) -> None:
        cloud = self.server.cloud
        allowed = all(self.headers[name] == value for name, value in cloud.headers.items())
        if not cloud.headers:
            allowed = self.headers["X-aws-ec2-metadata-token"] == "a token"
        if not allowed or self.path not in (cloud.notice_path, cloud.name_path):
            self.reply(None)
        elif self.path == cloud.notice_path:
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
    cloud = find_cloud("auto", metadata.address)
    assert cloud is metadata.cloud
    assert not has_notice(cloud, metadata.address)
    metadata.answer = next(NOTICES[name] for name, one in CLOUDS.items() if one is cloud)
    assert has_notice(cloud, metadata.address)
    for wrong in ("", "{", "[]", "null", '{"Events": [1]}', OTHER, '{"action": "none"}'):
        metadata.answer = wrong
        assert not has_notice(cloud, metadata.address)


def test_an_unknown_cloud_or_a_hanging_address_is_no_notice(monkeypatch):
    monkeypatch.setattr(notice, "SEARCH_SECONDS", 0.1)
    monkeypatch.setattr(notice, "EVERY_SECONDS", 0.1)
    monkeypatch.setattr(notice, "ANSWER_SECONDS", 0.2)
    assert find_cloud("auto", "http://127.0.0.1:9") is None
    with Metadata("gcp") as server:
        server.shutdown()  # it listens, and never answers
        assert not has_notice(CLOUDS["gcp"], server.address)


CATCHES = (
    "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: exit(7)); print(1, flush=True)"
)
LAUNCHES = "import subprocess, sys; exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"


def test_only_a_process_that_handles_the_signal_gets_it():
    """A launcher that does not would die of it, and leave its worker alone."""
    wait = "; time.sleep(60)"
    for worker, code in ((CATCHES + wait, 7), ("import time; print(1, flush=True)" + wait, None)):
        words = [sys.executable, "-c", LAUNCHES, worker]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as launcher:
            launcher.stdout.readline()
            process = psutil.Process(launcher.pid)
            assert tell(process, signal.SIGUSR1) == (code is not None)
            if code is None:
                assert launcher.poll() is None
                for one in (*process.children(), process):
                    one.kill()
            assert launcher.wait(20) == (code or -signal.SIGKILL)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["aws"], "a command is missing"),
        (["aws", "--"], "a command is missing"),
        (["oracle", "--", "true"], "invalid choice: 'oracle'"),
        (["aws", "accelerate", "launch"], "unrecognized arguments: accelerate launch"),
    ],
)
def test_a_mistake_is_refused_with_a_sentence(words, sentence, capsys):
    with pytest.raises(SystemExit) as raised:
        parse(words)
    assert raised.value.code == exits.EXIT_USER_MISTAKE
    assert sentence in capsys.readouterr().err


def test_the_exit_code_is_the_command_s():
    for command, code in (("exit(5)", 5), ("import os; os.kill(os.getpid(), 9)", 137)):
        words = [*MODULE, "gcp", "--address=http://127.0.0.1:9", "--"]
        ended = subprocess.run([*words, sys.executable, "-c", command], cwd=runs.ROOT, check=False)
        assert ended.returncode == code


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("starts", "config", "code"),
    [
        ("accelerate", "cpu.yaml", 1),  # as the launcher says; the run's own is in its directory
        pytest.param("accelerate", "ddp_cpu.yaml", 1, marks=pytest.mark.slow),
        pytest.param("attempts", "cpu.yaml", 75, marks=pytest.mark.slow),
        pytest.param("attempts", "ddp_cpu.yaml", 75, marks=pytest.mark.slow),
    ],
)
def test_a_notice_stops_a_run_with_a_snapshot(small, tmp_path, hub, starts, config, code):
    """Within the half minute that Google gives, the upload included; no step is lost."""
    run_dir = tmp_path / "run"
    words = [
        *small,
        *ENDLESS,
        "optim.min_learning_rate=0.003",  # the same at each step, so a shorter run has its bits
        *hubs.words(run_dir),
    ]
    launch = runs.launch_command(config, *words)
    if starts == "attempts":
        options = ["--restarts=5", "--again-elsewhere"]
        at = launch.index("--config_file")
        train = str(runs.ROOT / "train.py")
        rest = ["train.py" if word == train else word for word in launch[at:]]
        launch = [sys.executable, "-m", "cloud.attempts", *options, *rest]
    with Metadata("gcp") as server:
        told = [*MODULE, "auto", f"--address={server.address}", "--", *launch]
        said = tmp_path / "said"
        with runs.started(told, into=said, forked=False, **hub.environment()) as process:
            runs.wait_until(lambda: server.asked > 1, process)
            wait_for_steps(process, run_dir)
            server.answer, begun = NOTICES["gcp"], time.monotonic()
            assert process.wait(60) == code, said.read_text()
            seconds = time.monotonic() - begun
        server.shutdown()
    assert exit_code(run_dir) == 75
    assert "cloud.notice: this machine goes" in said.read_text()
    assert "stopped   by SIGUSR1" in said.read_text()
    place = only_snapshot(run_dir)
    assert hubs.step_of(hub) == step_of(place)
    print(f"on the Hub and ended {seconds:.1f} s after the notice")
    again = partial(runs.launch, config, **hub.environment())
    steps = step_of(place) + 5
    alone = [*words, "hub.repo_id=null", f"run.dir={tmp_path / 'whole'}"]
    first = again(*alone, f"train.max_steps={steps}")
    assert first.returncode == 0, first.stderr
    rest = again(*words, f"train.max_steps={steps}")
    assert rest.returncode == 0, rest.stderr
    runs.assert_same_bits(runs.snapshot(tmp_path / "whole", steps), runs.snapshot(run_dir, steps))
