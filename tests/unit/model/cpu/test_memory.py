"""What a process frees on a CPU, and takes again."""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import families
import plan
import runs
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
def test_freed_memory_is_kept_by_the_process():
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
import json, sys
from types import SimpleNamespace
import psutil, torch
from config.schema import Config
from model.cpu.malloc import keep_freed_memory
from training.run.tuning import tuning_for

def left(computes_on_cpu, sharded=False):
    torch.accelerator.is_available = lambda: not computes_on_cpu
    tuning_for(SimpleNamespace(device=torch.device("cuda")), Config())
    if sharded:
        keep_freed_memory(True)  # what steps gather is not kept
    before = psutil.Process().memory_info().rss
    weights = [(torch.ones(2_000_000), torch.ones(100)) for _ in range(25)]  # 200 MB
    few = [small for _, small in weights]  # what stays lies between
    del weights  # to the device, or sharded
    if computes_on_cpu and not sharded:
        keep_freed_memory(False)  # as before the first step
    return psutil.Process().memory_info().rss - before

print(left(*json.loads(sys.argv[1])))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
@pytest.mark.parametrize("case", [[False], [True], [True, True]], ids=["a GPU", "a CPU", "sharded"])
def test_weights_that_left_the_process_leave_its_memory(case):
    """Neither where a GPU computes, nor on a CPU where FSDP has sharded them.

    Each case has a process of its own: what mallopt was told cannot be taken back.
    """
    command = [sys.executable, "-c", START, json.dumps(case)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    assert int(result.stdout) < 40_000_000


@pytest.mark.slow
def test_a_process_under_fsdp_takes_what_its_plan_says(tmp_path, text_file, capsys):
    """The most that each process has resident: tensors, freed memory, torch and Python."""
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 10}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    base = families.make("llama", tmp_path / "base", **sizes, **heads, max_position_embeddings=256)
    words = [f"model.architecture={base}", "data.block_size=256", "train.micro_batch_size=2"]
    words += ["train.global_batch_size=4", "train.max_steps=4", "train.eval_every=4"]

    machine = ["--processes", "2", "--device", "cpu", "--precision", "no", "--memory", "16"]
    assert plan.main([*words, *machine, "--json"]) == 0
    fits = json.loads(capsys.readouterr().out)["fits"]
    (planned,) = (one for one in fits if one["strategy"]["name"] == "FSDP")
    planned = planned["peak"] + planned["outside"]

    words += [f"data.source={text_file}", f"run.dir={tmp_path / 'run'}", "train.eval_batches=1"]
    words += ["train.sample_every=0", f"data.cache_dir={tmp_path / 'cache'}"]
    most: dict[int, int] = {}
    command = runs.launch_command("fsdp_cpu.yaml", *words)
    with runs.started(command, tmp_path / "log", forked=False) as process:
        while process.poll() is None:
            for rank, worker in runs.workers(process).items():
                with contextlib.suppress(OSError, TypeError):  # it has just ended
                    status = Path(f"/proc/{worker.pid}/status").read_text()
                    most[rank] = 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])
            time.sleep(0.05)
        assert process.returncode == 0, (tmp_path / "log").read_text()
    print(f"planned {planned / 1e9:.2f} GB, taken {[one / 1e9 for one in most.values()]}")
    assert sorted(most) == [0, 1]
    assert max(most.values()) == pytest.approx(planned, rel=0.15)
