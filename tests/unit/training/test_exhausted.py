"""Memory that does not suffice is a sentence that names the keys, and no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import training.memory
from config.schema import ConfigError, OptimConfig
from model.family import parameter_count
from model.frozen import keep_frozen
from model.gpt import GPT, GPTConfig
from runs import ROOT
from training.distributed.processes import exit_code_for, is_lasting
from training.exits import EXIT_FAILED, EXIT_USER_MISTAKE
from training.memory import check_fits, in_words
from training.run import command, session
from training.run.stopping import Phase
from training.step import freeze

EXHAUSTED = [
    (MemoryError(), EXIT_USER_MISTAKE),
    (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), 2),
    (RuntimeError("Storage size calculation overflowed with sizes=[9, 9]"), EXIT_USER_MISTAKE),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), EXIT_USER_MISTAKE),
    # What ran there before may not have let go of it yet: that is no mistake.
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB."), EXIT_FAILED),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), EXIT_USER_MISTAKE),
]


FAULTS = """
import resource, sys, torch
from training.memory import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for megabytes in (4, 8, 16, 24, 30):  # by itself, glibc maps each that is larger than all before
    tensors = [torch.zeros(megabytes << 20, dtype=torch.uint8) for _ in range(3)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told")
@pytest.mark.parametrize(
    ("how", "more", "is_kept"),
    [
        ("kept", {}, True),
        ("not", {}, False),
        ("kept", {"ACCELERATE_USE_FSDP": "true"}, False),
    ],
)
def test_a_step_takes_the_pages_of_the_step_before(how, more, is_kept):
    environment = {name: x for name, x in os.environ.items() if not name.startswith("MALLOC_")}
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-c", FAULTS, how]
    output = subprocess.check_output(command, env=environment, cwd=ROOT, timeout=120)
    pages = 3 * (4 + 8 + 16 + 24 + 30 << 20) // 4096
    assert int(output) < 0.6 * pages if is_kept else int(output) > 0.9 * pages


@pytest.mark.parametrize(("error", "code"), EXHAUSTED)
def test_memory_that_is_exhausted_is_a_sentence_with_the_remedy(error, code):
    for begun, expected in ((False, code), (True, EXIT_FAILED)):
        problem = in_words(error, begun)
        for word in ("train.micro_batch_size", "model.n_embd", "model.n_layer", "plan.py"):
            assert word in str(problem)
        assert exit_code_for(problem) == expected
        # A launcher with restarts left starts a step again, and a model that is too large not.
        assert is_lasting(problem) == (expected == EXIT_USER_MISTAKE)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), OSError(errno.ENOSPC, "disk full"), ValueError("x")]
)
def test_another_error_stays_what_it_is(error):
    assert in_words(error, True) is error


@pytest.mark.parametrize(
    ("phase", "code", "word"),
    [
        (Phase.NOTHING_BEGUN, EXIT_USER_MISTAKE, "error: "),
        (Phase.TRAINING, EXIT_FAILED, "stopped: "),
    ],
)
def test_a_run_without_memory_ends_with_a_sentence(
    phase, code, word, tmp_path, monkeypatch, capsys
):
    def main(config, session) -> None:
        session.signals.phase = phase
        torch.empty(2**55)

    signals = SimpleNamespace(cause=None)  # that leave those of this process alone
    monkeypatch.setattr(sys, "argv", ["train.py", f"run.dir={tmp_path / 'run'}"])
    monkeypatch.setattr(session, "Signals", lambda *_: signals)
    monkeypatch.setattr(command, "_leave", lambda code, lock: sys.exit(code))
    monkeypatch.setattr(command, "make_output_lossy", lambda: None)
    with pytest.raises(SystemExit) as ended:
        command.run_command(main)
    said = capsys.readouterr().err
    assert ended.value.code == code
    assert said.startswith(f"{word}there is not enough memory for ")
    assert "Traceback" not in said


@pytest.fixture
def machine(monkeypatch):
    """A machine whose processes train on a CPU, and have `left` bytes together."""
    machine = SimpleNamespace(left=0, set=monkeypatch.setenv)
    monkeypatch.setattr(training.memory, "available_memory", lambda with_swap: machine.left)
    monkeypatch.setattr(training.memory, "run_on_all", lambda accelerator, work: work())
    machine.set("ACCELERATE_USE_CPU", "true")
    return machine


def assert_needs(machine, bytes_needed: int, words: str, model: GPT, *key: str) -> None:
    """Assert that a model fits into so many bytes, and not into one less."""
    machine.left = bytes_needed
    check_fits(None, model, OptimConfig(), *key)
    machine.left -= 1
    with pytest.raises(ConfigError, match=words):
        check_fits(None, model, OptimConfig(), *key)


@pytest.mark.parametrize("in_training", [False, True])
def test_a_model_too_large_for_the_machine_is_refused(machine, in_training):
    model = GPT(GPTConfig(vocab_size=11, block_size=7, n_layer=3, n_head=2, n_embd=8))
    needed = 4 * parameter_count(model) * (4 if in_training else 1)
    machine.set("ACCELERATE_USE_FSDP", str(not in_training))
    machine.set("WORLD_SIZE", "1" if in_training else "4")
    assert_needs(machine, needed, r"model\.n_layer=3 and model\.n_embd=8 need .* GB", model)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        machine.set(name, "4")  # which share it
    assert_needs(machine, 4 * needed, "its share of 4 processes, are left", model)


def test_frozen_weights_need_neither_gradient_nor_moments(machine):
    """Whether a model fits depends on what is trained, and on the dtype of the rest."""
    model = GPT(GPTConfig(vocab_size=11, block_size=7, n_layer=3, n_head=2, n_embd=8))
    freeze(model, ["*.h.*"])
    keep_frozen(model, "bf16")
    frozen = parameter_count(model.blocks)
    matrices = sum(one.numel() for one in model.blocks.parameters() if one.dim() > 1)
    needed = 16 * (parameter_count(model) - frozen) + 4 * (frozen - matrices) + 2 * matrices
    key = "model.pretrained=base"
    assert_needs(machine, needed, r"model\.pretrained=base needs .* GB", model, key)
