"""A process computes with the cores that it may use, not with those that the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

import training.run.tuning
from config.compose import load_config
from model.cpu import cores
from model.cpu.threads import Threads
from snapshot.command_line import usable_device
from training.run.tuning import CpuTuning


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
            {"cpu,cpuacct/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        (
            "4:cpuacct,cpu:/docker/12\n",  # not the order of the folder's name
            {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000"},
            4,
        ),
        ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "9"}, math.inf),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {}, math.inf),
    ],
)
def test_the_limit_is_the_least_of_the_control_groups(tmp_path, lines, files, expected):
    root = system(tmp_path, lines, {f"sys/fs/cgroup/{name}": at for name, at in files.items()})
    assert cores.cores_of_control_groups(root) == expected
    assert cores.cores_of_control_groups(tmp_path / "no Linux") == math.inf


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [(0.2, 1), (1.2, 1), (1.5, 2), (2.5, 3), (3.7, 4), (8, 8), (math.inf, 8)],
)
def test_a_limit_is_rounded_to_whole_cores(monkeypatch, allowed, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(cores, "cores_of_control_groups", lambda: allowed)
    assert cores.cores() == expected


@pytest.fixture
def threads(monkeypatch) -> list[int]:
    """The number of threads, at first 64, where control groups allow 4 cores."""
    used = [64]
    monkeypatch.setattr(torch, "get_num_threads", lambda: used[-1])
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    monkeypatch.setattr(cores, "cores_of_control_groups", lambda: 4.0)
    for name in ("use_one_heap", "keep_freed_memory"):  # for good, in the process of the tests
        monkeypatch.setattr(training.run.tuning, name, lambda *_: None)
    return used


def begun(adapt_threads: bool = True) -> CpuTuning:
    """The tuning of a run of one process."""
    config = load_config([f"run.adapt_threads={adapt_threads}"])
    return CpuTuning(Accelerator(cpu=True), config)


def test_a_container_takes_threads_for_its_own_cores(threads):
    warnings = []
    tuning = begun()
    assert threads == [64, 4]
    tuning.loaded(warnings.append)
    assert "4 of 64 threads: CPU affinity or a control group leaves" in warnings[0]
    Threads(1, True, 4, warnings.append)
    assert len(warnings) == 1


def test_processes_share_what_the_container_may_use(threads, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    begun()
    assert threads == [64, 2]


def test_the_number_can_be_kept(threads):
    begun(adapt_threads=False)
    assert threads == [64]


def test_fewer_threads_than_allowed_stay(threads):
    threads.append(3)
    begun()
    assert threads[-1] == 3


def test_commands_that_compute_on_a_cpu_do_so_too(threads):
    usable_device("cpu")
    assert threads == [64, 4]
