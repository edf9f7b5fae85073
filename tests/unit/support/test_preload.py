"""What is forked by the server is what a new process would be."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

import preload
import runs
from preload_server import FIRST, OF_THE_HUB, READ_LATER, THEN

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


def ended(words: list[str], kind: type[subprocess.Popen] = preload.Process, **changes: str):
    """A process of either kind, at its end, with what it printed."""
    pipe, environment = subprocess.PIPE, preload.environment(**changes)
    with kind(words, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=runs.ROOT) as one:
        out, errors = one.communicate(timeout=runs.DEADLINE_SECONDS)
    return one, out, errors


def told(out: str) -> list[dict]:
    """What each probe found, in the order of their ranks."""
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda one: one["environment"].get("RANK", ""))


@pytest.mark.parametrize("options", [(), ("-u",)])
def test_a_fork_is_given_what_a_new_process_is(options):
    words = [sys.executable, *options, str(PROBE), "found", "an argument", "", "last"]
    fork, out, _ = ended(words, RANK="3", HF_TOKEN="hf_x")
    _, expected, _ = ended(words, subprocess.Popen, RANK="3", HF_TOKEN="hf_x")
    assert fork.forked
    (is_given,), (should_be,) = told(out), told(expected)
    assert is_given["words"] == words
    assert is_given.pop("parent") != should_be.pop("parent")
    assert is_given == should_be


ENDS = {
    "exit 75": 75,
    "says a-sentence": 1,
    "fails a-reason": 1,
    "dies 9": -signal.SIGKILL,
    "lingers": 0,
}


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "code"), ENDS.items())
def test_a_fork_ends_as_a_new_process_does(how, code):
    words = [sys.executable, str(PROBE), *how.split()]
    fork, out, errors = ended(words)
    new, should_print, should_say = ended(words, subprocess.Popen)
    assert fork.forked
    assert fork.returncode == new.returncode == code
    assert out == should_print
    assert errors.splitlines()[-1:] == should_say.splitlines()[-1:]  # below a traceback of its own


@pytest.mark.slow
def test_nothing_that_is_imported_has_read_another_value():
    """A variable that an import reads leads to another server, or to a new process."""
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
    assert [name for name in first if name.startswith(OF_THE_HUB)] == []
    assert [name for name in first | then if name.startswith(READ_LATER)] == []
    assert has_other_openmp == "False"  # which would read KMP_*


@pytest.mark.thorough
def test_what_an_import_may_have_read_has_a_new_process():
    process, out, _ = ended([sys.executable, str(PROBE), "found"], OMP_NUM_THREADS="2")
    assert not process.forked
    assert told(out)[0]["environment"]["OMP_NUM_THREADS"] == "2"


@pytest.mark.thorough
def test_forked_workers_get_what_accelerate_launch_gives():
    """The real launcher, but for its workers, which are forked instead of being started."""
    words = runs.launch_command("ddp_cpu.yaml", "found", script=PROBE)
    fork, out, errors = ended(words)
    _, expected, _ = ended(words, subprocess.Popen)
    assert fork.forked, errors
    are_given, should_be = told(out), told(expected)
    assert [one["environment"].get("RANK") for one in are_given] == ["0", "1"]
    for one in (*are_given, *should_be):
        for environment in (one["environment"], one["shown environment"]):
            del environment["TORCHELASTIC_ERROR_FILE"]  # of a random folder
    assert are_given == should_be
    assert are_given[0]["parent"] == words
