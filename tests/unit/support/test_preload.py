"""What is forked from the template is what a new process would be."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

import preload
import preload_server
import runs
from preload_server import FIRST, READ_LATER, THEN

pytestmark = pytest.mark.skipif(not preload.POSSIBLE, reason="processes are forked on Linux only")

PROBE = runs.ROOT / "tests" / "support" / "preload_probe.py"
READS = """
import importlib, os, sys
read = set()
class Recorded(type(os.environ)):
    def __getitem__(self, name):
        files = [sys._getframe(depth).f_code.co_filename for depth in range(1, 6)]
        if not any(file.endswith(("tqdm/utils.py", "fsspec/config.py")) for file in files):
            read.add(name)  # those two go through all there are, for names that begin as theirs do
        return super().__getitem__(name)
    def __contains__(self, name):
        read.add(name)
        return super().__contains__(name)
os.environ.__class__ = Recorded
sys.path.insert(0, sys.argv[1])
for stage in sys.argv[2:]:
    for module in stage.split(","):
        importlib.import_module(module)
    print(",".join(sorted(read)))
    read.clear()
with open("/proc/self/maps") as maps:
    print(any("omp5" in line or "libomp" in line for line in maps))
"""


def probe(*words: str) -> list[str]:
    return [sys.executable, str(PROBE), *words]


def ended(words: list[str], kind: type[subprocess.Popen] = preload.Process, **changes: str):
    """A process of either kind, at its end."""
    with kind(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=preload.environment(**changes),
        cwd=runs.ROOT,
    ) as process:
        out, errors = process.communicate(timeout=runs.DEADLINE_SECONDS)
    return process, out, errors


def told(out: str) -> list[dict]:
    """What each probe found, in the order of their ranks."""
    decoder, all_told, at = json.JSONDecoder(), [], 0
    while (at := out.find("{", at)) != -1:
        one, at = decoder.raw_decode(out, at)
        all_told.append(one)
    return sorted(all_told, key=lambda one: one["environment"].get("RANK", ""))


@pytest.mark.parametrize("options", [(), ("-u",)])
def test_a_fork_is_given_what_a_new_process_is(options):
    words = [sys.executable, *options, str(PROBE), "found", "an argument", "", "last"]
    fork, out, _ = ended(words, RANK="3", HF_TOKEN="hf_x")
    new, expected, _ = ended(words, subprocess.Popen, RANK="3", HF_TOKEN="hf_x")
    assert fork.forked
    (is_given,), (should_be,) = told(out), told(expected)
    assert is_given["words"] == words
    assert is_given.pop("parent") != should_be.pop("parent")
    assert is_given == should_be
    assert fork.returncode == new.returncode == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "code"),
    [
        (("exit", "0"), 0),
        (("exit", "75"), 75),
        (("says", "a sentence"), 1),
        (("fails", "a reason"), 1),
        (("leaves", "9"), 9),
        (("dies", str(int(signal.SIGKILL))), -signal.SIGKILL),
        (("dies", str(int(signal.SIGTERM))), -signal.SIGTERM),
        (("interrupted",), -signal.SIGINT),
        (("lingers",), 0),
    ],
)
def test_a_fork_ends_as_a_new_process_does(how, code):
    fork, *said = ended(probe(*how))
    new, *should_say = ended(probe(*how), subprocess.Popen)
    assert fork.forked
    assert fork.returncode == new.returncode == code
    assert said == should_say


@pytest.mark.slow
def test_a_module_is_run_as_python_does(tmp_path):
    words = [sys.executable, "-m", "snapshot", "list", str(tmp_path / "none")]
    fork, *said = ended(words)
    new, *should_say = ended(words, subprocess.Popen)
    assert fork.forked
    assert fork.returncode == new.returncode == 2
    assert said == should_say


@pytest.mark.slow
def test_nothing_that_is_imported_has_read_another_value():
    """A variable that an import reads leads to another template, or to a new process."""
    result = subprocess.run(
        [sys.executable, "-c", READS, str(runs.ROOT), ",".join(FIRST), ",".join(THEN)],
        capture_output=True,
        text=True,
        check=True,
        env=preload.environment(),
    )
    *read, has_other_openmp = result.stdout.splitlines()
    first, then = (set(line.split(",")) for line in read)
    assert {"TORCH_LOGS", "CXX"} <= first
    assert "HF_ENDPOINT" in then
    assert [name for name in first if name.startswith(preload_server.OF_THE_HUB)] == []
    assert [name for name in first | then if name.startswith(READ_LATER)] == []
    assert has_other_openmp == "False"  # which would read KMP_*


@pytest.mark.thorough
def test_the_address_of_the_hub_is_that_of_the_environment():
    for address in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
        fork, out, _ = ended(probe("hub"), HF_ENDPOINT=address)
        assert fork.forked
        assert out == f"begun\n{address}\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        {"OMP_NUM_THREADS": "2"},
        {"PYTHONIOENCODING": "ascii"},
        {"UNHEARD_OF": "1"},
        {"CUDA_VISIBLE_DEVICES": "0"},
    ],
)
def test_what_the_first_stage_may_have_read_has_a_new_process(changes):
    process, out, _ = ended(probe("found"), **changes)
    assert not process.forked
    assert told(out)[0]["environment"].items() >= changes.items()


@pytest.mark.thorough
def test_what_torch_sets_in_the_tests_is_not_inherited(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")
    process, out, _ = ended(probe("found"))
    assert process.forked
    assert "TORCHINDUCTOR_CACHE_DIR" not in told(out)[0]["environment"]


@pytest.mark.thorough
def test_another_program_is_a_new_process(tmp_path):
    elsewhere = tmp_path / "train.py"
    elsewhere.write_text("print(__file__)")
    process, out, _ = ended([sys.executable, str(elsewhere)])
    assert not process.forked
    assert out == f"{elsewhere}\n"


@pytest.mark.thorough
def test_a_fork_has_its_number_until_its_end_is_seen():
    with preload.Process(probe("exit", "3"), env=preload.environment()) as process:
        assert process.forked
        psutil.Process(process.pid)
        end = time.monotonic() + runs.DEADLINE_SECONDS
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end
        assert process.wait(runs.DEADLINE_SECONDS) == process.poll() == process.returncode == 3
    _wait_until_gone(process.pid)


@pytest.mark.thorough
def test_a_fork_can_be_waited_for_and_killed():
    with preload.Process(probe("waits"), env=preload.environment()) as process:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        assert process.poll() is None
        process.kill()
        assert process.wait(runs.DEADLINE_SECONDS) == -signal.SIGKILL


@pytest.mark.slow
def test_the_templates_end_with_the_tests(tmp_path):
    program = tmp_path / "tests.py"
    program.write_text(
        f"import sys\nsys.path[:0] = {[str(runs.ROOT), str(runs.ROOT / 'tests' / 'support')]!r}\n"
        "import preload, psutil\n"
        f"with preload.Process({probe('exit', '0')!r}, env=preload.environment()) as process:\n"
        "    assert process.forked\n"
        "print(*[p.pid for p in psutil.Process().children(recursive=True)])\n"
    )
    result = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True, timeout=120
    )
    pids = [int(pid) for pid in result.stdout.splitlines()[-1].split()]
    assert len(pids) >= 2  # of two stages
    for pid in pids:
        _wait_until_gone(pid)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        pytest.param("cpu.yaml", [None], marks=pytest.mark.slow),
        ("ddp_cpu.yaml", ["0", "1"]),
        pytest.param("fsdp_cpu.yaml", ["0", "1"], marks=pytest.mark.slow),
    ],
)
def test_forked_workers_get_what_accelerate_launch_gives(config, ranks):
    """The real launcher, but for its workers, which are forked instead of being started."""
    words = runs.launch_command(config, "found", script=PROBE)
    fork, out, errors = ended(words)
    new, expected, _ = ended(words, subprocess.Popen)
    assert fork.forked, errors
    assert fork.returncode == new.returncode == 0, errors
    are_given, should_be = told(out), told(expected)
    assert [one["environment"].get("RANK") for one in are_given] == ranks
    for ours, theirs in zip(are_given, should_be, strict=True):
        assert ours["parent"] == theirs["parent"] == words
        for one in (ours, theirs):
            for environment in (one["environment"], one["shown environment"]):
                file = environment.pop("TORCHELASTIC_ERROR_FILE", None)  # of a random folder
                assert ranks == [None] or re.fullmatch(r"/.*/attempt_0/\d/error.json", file)
        assert ours == theirs


@pytest.mark.slow
def test_a_worker_that_fails_ends_a_forked_launch_as_a_real_one():
    words = runs.launch_command("ddp_cpu.yaml", "exit", "3", script=PROBE)
    fork, _, errors = ended(words)
    new, _, expected = ended(words, subprocess.Popen)
    assert fork.forked
    assert fork.returncode == new.returncode == 1
    assert errors.splitlines()[-1] == expected.splitlines()[-1]
    assert "exitcode  : 3" in errors
    assert "exitcode  : 3" in expected


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp_cpu.yaml", "fsdp_cpu.yaml"])
def test_a_forked_run_has_the_bits_of_a_launched_one(small, tmp_path, config):
    words = [*small, "model.dropout=0.1", "train.max_steps=6", "snapshot.every=6"]
    for name, forked in (("forked", True), ("new", False)):
        result = runs.launch(config, *words, f"run.dir={tmp_path / name}", forked=forked)
        assert result.returncode == 0, result.stderr
        assert "2 processes, CPU" in result.stdout
    runs.assert_same_bits(*(runs.snapshot(tmp_path / name, 6) for name in ("forked", "new")))
    assert runs.losses(tmp_path / "forked") == runs.losses(tmp_path / "new")


def _wait_until_gone(pid: int) -> None:
    end = time.monotonic() + runs.DEADLINE_SECONDS
    while psutil.pid_exists(pid):
        assert time.monotonic() < end
        time.sleep(0.01)
