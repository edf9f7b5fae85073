"""A process computes with the cores that it may use, not with those that the machine has."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest
import torch

import runs
from model import cpu
from snapshot.command_line import usable_device
from training.distributed import launcher
from training.distributed.launcher import fit_threads

LIMITED = """
import sys
sys.path.insert(0, {root!r})
import model.cpu, train
from training.run.command import run_command
model.cpu.cores_of_control_groups = lambda: 1.2
run_command(train.main)
"""


def system(root: Path, lines: str, files: dict[str, str]) -> Path:
    """A Linux that says its processes are in these control groups."""
    for name, content in {"proc/self/cgroup": lines, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "120000 100000\n"}, 1.2),  # a container sees its group as the root
        ("0::/job/step\n", {"job/cpu.max": "400000 100000\n", "job/step/cpu.max": "max 100000"}, 4),
        ("0::/job/step\n", {"job/cpu.max": "4 2\n", "job/step/cpu.max": "7 2\n"}, 2),
        (
            "5:cpu,cpuacct:/docker/12\n4:memory:/docker/12\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "9"}, math.inf),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {}, math.inf),
    ],
)
def test_the_limit_is_the_least_of_the_control_groups(tmp_path, lines, files, expected):
    root = system(tmp_path, lines, {f"sys/fs/cgroup/{name}": at for name, at in files.items()})
    assert cpu.cores_of_control_groups(root) == expected
    assert cpu.cores_of_control_groups(tmp_path / "no Linux") == math.inf


@pytest.fixture
def threads(monkeypatch) -> list[int]:
    """The number of threads, at first 64, where control groups allow 4 cores."""
    used = [64]
    monkeypatch.setattr(torch, "get_num_threads", lambda: used[-1])
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    monkeypatch.setattr(cpu, "cores_of_control_groups", lambda: 4.0)
    monkeypatch.setattr(launcher, "on_cpu", lambda: True)
    return used


@pytest.mark.parametrize(
    ("processes", "before", "after"),
    [("1", 64, 4), ("2", 64, 2), ("1", 4, 4), ("1", 3, 3)],
)
def test_processes_share_the_cores_of_the_container(threads, monkeypatch, processes, before, after):
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    threads.append(before)
    fit_threads()
    assert threads[-1] == after


def test_a_run_on_a_gpu_keeps_its_threads_and_commands_on_a_cpu_take_no_more(threads, monkeypatch):
    monkeypatch.setattr(launcher, "on_cpu", lambda: False)
    fit_threads()
    assert threads == [64]
    usable_device("cpu")
    assert threads == [64, 4]


def test_a_run_has_as_many_threads_as_it_may(small, tmp_path):
    script = tmp_path / "limited.py"
    script.write_text(LIMITED.format(root=str(runs.ROOT)))
    words = [*small, "train.max_steps=1", f"run.dir={tmp_path / 'run'}"]
    result = runs.run([sys.executable, str(script), *words], OMP_NUM_THREADS="2")
    assert result.returncode == 0, result.stderr
    assert "CPU with 1 thread," in result.stdout
