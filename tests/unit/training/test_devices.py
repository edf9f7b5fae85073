"""What is chosen, and said, for devices that the machine of these tests need not have."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from config.compose import load_config
from training.distributed.processes import OF_THREADS, ProcessGroupTimeouts
from training.step import compute_reproducibly


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, as far as torch is asked whether there is one."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("gpu")
def test_what_attention_adds_up_on_a_gpu_it_adds_up_in_one_order():
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        compute_reproducibly()
        assert torch.are_deterministic_algorithms_enabled()
        # With it, attention's backward pass only warns, and differs from run to run.
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.usefixtures("gpu")
def test_a_compiled_run_on_a_gpu_does_not_choose_by_time(monkeypatch):
    import torch._inductor.config as inductor  # with the compiler

    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    for is_compiled in (False, True):
        with inductor.patch(deterministic=False):
            compute_reproducibly(is_compiled)
            assert inductor.deterministic == is_compiled


class ProcessGroup(str):
    """A process group, by its description."""

    group_desc = property(str)


def test_from_the_start_every_group_has_the_long_patience(monkeypatch):
    """Only that of the threads that write snapshots keeps its own."""
    waits = {}
    monkeypatch.setattr(c10d, "_set_pg_timeout", lambda time, group: waits.update({group: time}))
    groups = dict.fromkeys(map(ProcessGroup, ("all", "shards", OF_THREADS)))
    monkeypatch.setattr(type(c10d._world), "pg_map", groups)
    run = load_config(["run.start_timeout_seconds=700"]).run

    waited = []
    wait = lambda: waited.append(dict(waits))  # noqa: E731
    timeouts = ProcessGroupTimeouts(SimpleNamespace(num_processes=2, wait_for_everyone=wait), run)
    assert waits == dict.fromkeys(("all", "shards"), timedelta(seconds=700))
    timeouts.wait_for_everyone(240.5)  # for the last upload
    assert waited == [dict.fromkeys(("all", "shards"), timedelta(seconds=940.5))]
