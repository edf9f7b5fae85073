"""What only a GPU shows: streams beside each other, and its own arithmetic. Skipped without one."""

from __future__ import annotations

import os

import pytest
import torch

import runs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
CONFIG = "single_gpu.yaml"
GPU = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}


@pytest.mark.parametrize("backend", ["no", "inductor"])
def test_a_failure_during_a_snapshot_leaves_the_bits_unchanged(small, tmp_path, backend):
    # Enough positions for attention to add up in pieces, and a step that a snapshot fits beside.
    overrides = [*small, "model.dropout=0.1", "train.micro_batch_size=4", "model.n_embd=256"]
    overrides += ["data.block_size=512"]

    def run(kind: str, folder: str):
        words = [kind, *overrides, f"run.dir={tmp_path / folder}"]
        options = (f"--dynamo_backend={backend}",)
        command = runs.launch_command(CONFIG, *words, options=options, script=runs.BESIDE)
        return runs.run(command, **GPU)

    whole = run("goes_on", "whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert "beside a step: [10, 20]" in whole.stdout
    assert ("compiled by block" in whole.stdout) == (backend == "inductor")
    failed = run("fails", "parts")
    assert "ArithmeticError: in the step beside a snapshot" in failed.stderr
    rest = run("goes_on", "parts")
    assert rest.returncode == 0, rest.stdout + rest.stderr
    assert "step-00000010, the newest of this run" in rest.stdout
    for step in (10, 20, 30):
        ours, theirs = (runs.snapshot(tmp_path / name, step) for name in ("parts", "whole"))
        runs.assert_same_bits(ours, theirs)
    assert runs.losses(tmp_path / "parts") == runs.losses(tmp_path / "whole")
