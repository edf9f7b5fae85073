"""What a process frees on a CPU, and takes again."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

from runs import ROOT

SCRIPT = """
import json, resource, sys
import torch
from model.cpu.malloc import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory(False)

def passes():
    for _ in range(20):
        parts = [torch.ones(2_000_000) for _ in range(5)]  # 40 MB
        parts += [part + 1 for part in parts]
        del parts

passes()
before = resource.getrusage(resource.RUSAGE_SELF)
passes()
after = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([after.ru_minflt - before.ru_minflt, after.ru_maxrss]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
@pytest.mark.thorough
def test_memory_that_was_freed_is_not_taken_from_the_system_again():
    (taken, most), (taken_without, most_without) = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", SCRIPT, word],
                cwd=ROOT,
                capture_output=True,
                check=True,
                text=True,
            ).stdout
        )
        for word in ("keep", "as it is")
    )

    assert taken < 2000  # pages, of which 20 times 80 MB are 400,000
    assert taken < taken_without / 2
    assert most < most_without + 80_000  # KB: never more than a pass takes


THREADS = """
import resource, threading
import torch
from model.cpu.malloc import keep_freed_memory, use_one_heap

use_one_heap()
keep_freed_memory(False)
torch.ones(5_000_000)  # 20 MB, which stay for the next

def work(barrier):
    barrier.wait()  # all are there at once, each with a heap of its own if it may have one
    with lock:
        torch.ones(5_000_000)

lock, barrier = threading.Lock(), threading.Barrier(8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
threads = [threading.Thread(target=work, args=(barrier,)) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_what_one_thread_has_freed_another_uses_again():
    """An upload has many threads; each would keep what it has freed, up to some 60 MB."""
    result = subprocess.run(
        [sys.executable, "-c", THREADS], cwd=ROOT, capture_output=True, check=True, text=True
    )
    assert int(result.stdout) < 40_000  # KB; eight heaps would have 160,000


START = """
import json
import psutil, torch
from config.schema import Config
from model.cpu.malloc import keep_freed_memory
from training.run.tuning import tuning_for

def left(computes_on_cpu, sharded=False):
    torch.accelerator.is_available = lambda: not computes_on_cpu
    tuning_for(None, Config())
    if sharded:
        keep_freed_memory(True)  # what steps gather is not kept
    before = psutil.Process().memory_info().rss
    weights = [(torch.ones(2_000_000), torch.ones(100)) for _ in range(25)]  # 200 MB
    few = [small for _, small in weights]  # what stays lies between
    del weights  # to the device, or sharded
    if computes_on_cpu and not sharded:
        keep_freed_memory(False)  # as before the first step
    return psutil.Process().memory_info().rss - before

print(json.dumps([left(False), left(True), left(True, sharded=True)]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_weights_that_have_left_the_process_do_not_stay_in_its_memory():
    """Neither where a GPU computes, nor on a CPU where FSDP has sharded them."""
    result = subprocess.run(
        [sys.executable, "-c", START], cwd=ROOT, capture_output=True, check=True, text=True
    )
    for left in json.loads(result.stdout):
        assert left < 40_000_000
