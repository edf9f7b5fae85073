"""What is chosen, and said, for devices that the machine of these tests need not have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from training import console, distribution
from training.compiling import why_not_compiled
from training.compose import load_config
from training.reproducible import compute_reproducibly


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, as far as torch is asked whether there is one."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("gpu")
def test_a_run_on_the_cpu_beside_a_gpu_is_one_of_a_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    monkeypatch.delenv("EMULATE_BF16", raising=False)
    monkeypatch.setattr(distribution, "cpu_has_bf16", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert distribution.precision_here() is None
    assert "gcc" in why_not_compiled(load_config([]))

    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")

    assert distribution.precision_here() == "no"
    assert "g++" in why_not_compiled(load_config([]))


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


@pytest.mark.parametrize(
    ("native", "offload", "threads", "hints"),
    [
        (True, False, 1, []),
        (False, False, 1, ["A Tesla has no bf16 instructions, "]),
        (True, True, 1, ["uses 4 of 16 cores. accelerate launch --num_cpu_threads_per_process 4 "]),
        (True, True, 4, []),
    ],
)
def test_what_would_make_gpus_faster_is_said(monkeypatch, native, offload, threads, hints):
    plugin = SimpleNamespace(
        cpu_offload=SimpleNamespace(**({"pin_memory": True} if offload else {}))
    )
    accelerator = SimpleNamespace(
        device=torch.device("cuda"),
        num_processes=4,
        mixed_precision="bf16",
        is_fsdp2=True,
        state=SimpleNamespace(fsdp_plugin=plugin),
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Tesla")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(console, "cores", lambda: 16)

    found = console.machine_hints(accelerator)

    assert len(found) == len(hints)
    assert all(part in hint for part, hint in zip(hints, found, strict=True))
