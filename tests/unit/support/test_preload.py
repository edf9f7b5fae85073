"""What is forked from the template is what a new process would be."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

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


ENDS = {
    "exit 0": 0,
    "exit 75": 75,
    "says a-sentence": 1,
    "fails a-reason": 1,
    "leaves 9": 9,
    "dies 9": -signal.SIGKILL,
    "interrupted": -signal.SIGINT,
    "lingers": 0,
}


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "code"), ENDS.items())
def test_a_fork_ends_as_a_new_process_does(how, code):
    fork, *said = ended(probe(*how.split()))
    new, *should_say = ended(probe(*how.split()), subprocess.Popen)
    assert fork.forked
    assert fork.returncode == new.returncode == code
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
@pytest.mark.parametrize("changes", [{"OMP_NUM_THREADS": "2"}, {"UNHEARD_OF": "1"}])
def test_what_the_first_stage_may_have_read_has_a_new_process(changes):
    process, out, _ = ended(probe("found"), **changes)
    assert not process.forked
    assert told(out)[0]["environment"].items() >= changes.items()


@pytest.mark.thorough
def test_forked_workers_get_what_accelerate_launch_gives():
    """The real launcher, but for its workers, which are forked instead of being started."""
    words = runs.launch_command("ddp_cpu.yaml", "found", script=PROBE)
    fork, out, errors = ended(words)
    new, expected, _ = ended(words, subprocess.Popen)
    assert fork.forked, errors
    assert fork.returncode == new.returncode == 0, errors
    are_given, should_be = told(out), told(expected)
    assert [one["environment"].get("RANK") for one in are_given] == ["0", "1"]
    for ours, theirs in zip(are_given, should_be, strict=True):
        assert ours["parent"] == theirs["parent"] == words
        for one in (ours, theirs):
            for environment in (one["environment"], one["shown environment"]):
                file = environment.pop("TORCHELASTIC_ERROR_FILE")  # of a random folder
                assert re.fullmatch(r"/.*/attempt_0/\d/error.json", file)
        assert ours == theirs
