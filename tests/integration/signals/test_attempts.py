"""What containers and jobs start: attempts of a run, whose exit codes and signals are passed on."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import psutil
import pytest

import runs
from cloud.attempts import Attempts, parse
from training import exits

MODULE = [sys.executable, "-m", "cloud.attempts"]
CPU = ("--config_file", "accelerate_configs/cpu.yaml", "train.py")

# Stands for the launcher: what each attempt leaves, one word for each. `75+` has a new snapshot.
LAUNCHER = """
import pathlib, sys
run_dir = pathlib.Path(sys.argv[1])
attempt = len(list(run_dir.glob("attempt-*")))
(run_dir / f"attempt-{attempt}").touch()
end = sys.argv[2:][attempt]
if end.endswith("+"):
    (run_dir / f"snapshots/step-{attempt + 1:08d}").mkdir(parents=True)
if end != "crash":
    (run_dir / "exit_code").write_text(end.rstrip("+"))
sys.exit(end != "0")
"""


@pytest.fixture
def handlers():
    """Attempts handle signals from the main thread, which here is the tests'."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("ends", "restarts", "code", "attempts"),
    [
        (["0"], 5, exits.EXIT_DONE, 1),
        (["2"], 5, exits.EXIT_USER_MISTAKE, 1),
        (["143+"], 5, exits.EXIT_TERMINATED, 1),
        (["130+"], 5, exits.EXIT_INTERRUPTED, 1),
        (["75+", "1", "crash", "0"], 5, exits.EXIT_DONE, 4),
        (["1", "crash", "1"], 2, exits.EXIT_FAILED, 3),
        (["1", "1+", "1", "1+", "1", "1", "75"], 2, exits.EXIT_AGAIN, 7),
        (["75+"], 0, exits.EXIT_AGAIN, 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_run_is_started_again_until_it_is_done_or_gets_nowhere(
    handlers, tmp_path, ends, restarts, code, attempts
):
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), *ends]
    final = (0, 2, 130, 143)
    assert Attempts(command, tmp_path).run(restarts, final, first_delay_seconds=0) == code
    assert len(list(tmp_path.glob("attempt-*"))) == attempts


def test_the_code_of_an_earlier_attempt_is_not_this_one_s(handlers, tmp_path):
    (tmp_path / "exit_code").write_text("0")
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), "crash"]
    assert Attempts(command, tmp_path).run(0, ()) == exits.EXIT_FAILED


@pytest.mark.thorough
def test_a_signal_between_two_attempts_prevents_the_next(tmp_path):
    code = (
        "import pathlib, sys; from cloud.attempts import Attempts;"
        "failing = Attempts([sys.executable, '-c', 'sys.exit(1)'], pathlib.Path(sys.argv[1]));"
        "sys.exit(failing.run(5, (), first_delay_seconds=1000))"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, cwd=runs.ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert "the next attempt begins in 300 s" in process.stdout.readline()
        process.terminate()
        assert process.wait(20) == exits.EXIT_FAILED


def test_a_notice_between_two_attempts_ends_with_the_code_for_another_machine(
    handlers, tmp_path, monkeypatch
):
    failing = Attempts([sys.executable, "-c", "exit(1)"], tmp_path)
    waiting = threading.Event()
    monkeypatch.setattr("builtins.print", lambda *_, **__: waiting.set())
    monkeypatch.setattr("cloud.attempts.has_notice", lambda *_: waiting.wait(20))
    watching = threading.Thread(target=failing.watch, args=(["gcp"], None))
    watching.start()
    assert failing.run(5, (), first_delay_seconds=1000) == exits.EXIT_AGAIN
    watching.join()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--restarts", "-1", "train.py"], "--restarts -1: must be at least 0"),
        (["--config_file", "a.yaml"], "train.py is missing after the options"),
        (["--notice", "oracle", "train.py"], "invalid choice: 'oracle'"),
    ],
)
def test_wrong_options_are_refused_with_a_sentence(words, sentence, capsys):
    with pytest.raises(SystemExit) as raised:
        parse(words)
    assert raised.value.code == exits.EXIT_USER_MISTAKE
    assert sentence in capsys.readouterr().err


def test_a_mistake_has_its_own_exit_code_and_is_not_tried_again(tmp_path):
    words = [*MODULE, "--restarts", "5", *CPU, f"run.dir={tmp_path / 'new'}", "train.max_stepz=5"]
    result = subprocess.run(words, cwd=runs.ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == exits.EXIT_USER_MISTAKE, result.stderr
    assert "train.max_stepz" in result.stderr
    assert "next attempt" not in result.stdout


TWO = ("--config_file", "accelerate_configs/ddp_cpu.yaml", "--main_process_port=0", "train.py")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "code", "launch"),
    [
        (signal.SIGTERM, exits.EXIT_TERMINATED, CPU),
        pytest.param(signal.SIGTERM, exits.EXIT_TERMINATED, TWO, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, exits.EXIT_AGAIN, CPU, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, exits.EXIT_INTERRUPTED, CPU, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_first_process_stops_with_a_snapshot(small, tmp_path, number, code, launch):
    elsewhere = "--again-elsewhere"  # or SIGUSR1 would bring the next attempt
    steps = "train.max_steps=100000"
    words = [*MODULE, "--restarts", "5", elsewhere, *launch, *small, steps, f"run.dir={tmp_path}"]
    with runs.started(words, into=tmp_path / "said", forked=False) as process:
        runs.wait_until(lambda: runs.newest_step(tmp_path) > 0, process)
        process.send_signal(number)
        assert process.wait(60) == code, (tmp_path / "said").read_text()
    assert runs.snapshot(tmp_path, runs.newest_step(tmp_path)).is_dir()
    assert "next attempt" not in (tmp_path / "said").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("starting", ["launcher", "train.py"])
def test_a_signal_during_the_start_ends_it_with_its_code(small, tmp_path, starting):
    words = [*MODULE, "--restarts", "5", *CPU, *small, f"run.dir={tmp_path}"]
    with runs.started(words, into=tmp_path / "said", forked=False) as process:
        attempts = psutil.Process(process.pid)
        deep = 1 if starting == "launcher" else 2
        runs.wait_until(lambda: len(attempts.children(recursive=True)) == deep, process)
        process.terminate()
        assert process.wait(30) == exits.EXIT_TERMINATED, (tmp_path / "said").read_text()
