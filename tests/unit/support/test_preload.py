"""What is forked by the server is what a new process would be."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import preload
import runs
from preload_server import IMPORTED, READ_LATER

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
for module in sys.argv[2:]:
    importlib.import_module(module)
print(*read)
"""


def found_in(words: list[str], kind: type[subprocess.Popen], **changes: str) -> tuple[list, int]:
    """What each probe found that a process of that kind started, by rank; and its exit code."""
    environment = preload.environment(**changes)
    with kind(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=runs.ROOT) as process:
        out, _ = process.communicate(timeout=runs.DEADLINE_SECONDS)
    assert getattr(process, "forked", True)
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda one: one["environment"].get("RANK", "")), process.returncode


@pytest.mark.parametrize("end", ["exit 75", pytest.param("dies 9", marks=pytest.mark.thorough)])
def test_a_fork_is_given_what_a_new_process_is_and_ends_as_it_does(end):
    words = [sys.executable, "-u", str(PROBE), *end.split(), "an argument", "", "last"]
    is_given, code = found_in(words, preload.Process, RANK="3", HF_TOKEN="hf_x")
    should_be, expected = found_in(words, subprocess.Popen, RANK="3", HF_TOKEN="hf_x")
    assert is_given[0]["words"] == words
    assert is_given[0].pop("parent") != should_be[0].pop("parent")
    pairs = zip(is_given, should_be, strict=True)
    different = [{k: (x, b[k]) for k, x in a.items() if x != b[k]} for a, b in pairs]
    assert not any(different), different
    assert code == expected


@pytest.mark.slow
def test_nothing_that_is_imported_has_read_another_value():
    """A variable that an import reads leads to another server, or to a new process."""
    words = [sys.executable, "-c", READS, str(runs.ROOT), *IMPORTED]
    result = runs.run(words, forked=False, code=0)
    read = result.stdout.split()
    assert {"TORCH_LOGS", "CXX", "HF_ENDPOINT"} <= {*read}
    assert [name for name in read if name.startswith(READ_LATER)] == []


@pytest.mark.thorough
def test_forked_workers_get_what_accelerate_launch_gives():
    """The real launcher, but for its workers, which are forked instead of being started."""
    words = runs.launch_command("ddp_cpu.yaml", "exit", "0", script=PROBE)
    are_given, _ = found_in(words, preload.Process)
    should_be, _ = found_in(words, subprocess.Popen)
    assert [one["environment"].get("RANK") for one in are_given] == ["0", "1"]
    for one in (*are_given, *should_be):
        for environment in (one["environment"], one["shown environment"]):
            del environment["TORCHELASTIC_ERROR_FILE"]  # of a random folder
    assert are_given == should_be
    assert are_given[0]["parent"] == words
