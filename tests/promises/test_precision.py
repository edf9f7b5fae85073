"""Promises 1 and 2 in every precision, and compiled: the losses of float32, and exact resumes."""

from __future__ import annotations

import json
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import runs
from sealed import seal
from snapshot.disk.folder import snapshot_folders, verify

STEPS = 30
SHAPES = {"one": ("cpu.yaml", 1), "DDP-2": ("ddp_cpu.yaml", 2), "FSDP-2": ("fsdp_cpu.yaml", 2)}
HEADERS = {
    "no": "float32",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "bf16 with products in fp8 (emulated)",
}
TOO_LARGE = 2.0**25  # a loss scale that only several halvings make small enough
OFTEN = ("snapshot.every=5", "snapshot.keep=9")


@pytest.fixture(scope="module")
def start(small, tmp_path_factory):
    """Run in a shape and a precision, in a directory, to whatever end."""
    folder = tmp_path_factory.mktemp("configs")

    def start(shape, precision, run_dir, *words, **changes):
        config, processes = SHAPES[shape]
        words = [*runs.WITH_BF16, *small, "train.eval_every=10", *words, f"run.dir={run_dir}"]
        if shape == "one" and not changes:  # as the launcher starts it, without the launcher's time
            command = [sys.executable, str(runs.ON_CPU), *words]
            result = runs.run(command, ACCELERATE_MIXED_PRECISION=precision)
        else:
            path = runs.rehearsal(config, folder, processes, mixed_precision=precision, **changes)
            result = runs.launch(path, *words, script=runs.ON_CPU)
        assert f"{processes} process{'es' if processes > 1 else ''}, CPU" in result.stdout
        assert f", {HEADERS[precision]}" in result.stdout
        return result

    return start


@pytest.fixture(scope="module")
def trained(start, tmp_path_factory):
    """The directory of a run of 30 steps with snapshots at 10, 20 and 30, made when asked for."""
    root = tmp_path_factory.mktemp("trained")

    @cache
    def trained(shape, precision) -> Path:
        run_dir = root / f"{shape}-{precision}"
        result = start(shape, precision, run_dir, "train.sample_every=30")
        assert result.returncode == 0, result.stderr
        assert "sample at step 30" in result.stdout
        return run_dir

    return trained


def state_of(run_dir: Path, step: int) -> dict:
    return json.loads((runs.snapshot(run_dir, step) / "state.json").read_text())


def begun_with_a_large_scale(source: Path, run_dir: Path) -> Path:
    """Another run directory with the snapshot of step 10, whole, but for its loss scale."""
    folder = runs.snapshot(copied(source, 10, run_dir), 10)
    state = state_of(run_dir, 10)
    state["loss_scaler"]["scale"] = TOO_LARGE
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)
    return run_dir


def copied(source: Path, step: int, run_dir: Path) -> Path:
    """Another run directory, as the first was after a step."""
    shutil.copytree(runs.snapshot(source, step), runs.snapshot(run_dir, step))
    shutil.copy(source / "metrics.jsonl", run_dir)
    return run_dir


def largest_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) == STEPS
    return max(abs(a - b) / a for a, b in zip(one, other, strict=True))


HALVES = [
    ("one", "fp16"),
    pytest.param("DDP-2", "fp16", marks=pytest.mark.slow),
    pytest.param("FSDP-2", "fp16", marks=pytest.mark.slow),
    ("one", "bf16"),
    pytest.param("FSDP-2", "bf16", marks=pytest.mark.slow),
    pytest.param("DDP-2", "bf16", marks=pytest.mark.slow),
    pytest.param("one", "fp8", marks=pytest.mark.thorough),
    pytest.param("DDP-2", "fp8", marks=pytest.mark.slow),
    pytest.param("FSDP-2", "fp8", marks=pytest.mark.slow),
]
MOST = {"bf16": 2e-3, "fp16": 2e-3, "fp8": 1e-2}
"""The largest relative difference of a loss."""


@pytest.mark.parametrize(("shape", "precision"), HALVES)
def test_half_precision_has_nearly_the_losses_of_float32(trained, shape, precision):
    exact = trained("one", "no")
    run_dir = trained(shape, precision)
    difference = largest_difference(runs.losses(exact), runs.losses(run_dir))
    print(f"largest relative difference, {precision}, {shape}: {difference:.1e}")
    assert difference < MOST[precision]
    assert difference > 2e-6  # it was not float32 after all
    held_out = [runs.metrics(place, "eval")[-1]["loss"] for place in (exact, run_dir)]
    assert held_out[1] == pytest.approx(held_out[0], rel=MOST[precision])
    assert not [record for record in runs.metrics(run_dir) if "skipped" in record]
    kinds = {tensor.dtype for tensor in runs.tensors(runs.snapshot(run_dir, STEPS)).values()}
    assert kinds == {torch.float32}


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_resumed_fsdp_run_ends_with_the_same_bits(trained, start, tmp_path, precision):
    through = trained("FSDP-2", precision)
    run_dir = copied(through, 10, tmp_path / "run")
    result = start("FSDP-2", precision, run_dir)
    assert result.returncode == 0, result.stderr
    assert "step-00000010, the newest of this run" in result.stdout
    for step in (20, STEPS):
        runs.assert_same_bits(runs.snapshot(through, step), runs.snapshot(run_dir, step))
    assert runs.losses(run_dir) == runs.losses(through)


@pytest.mark.parametrize(
    ("shape", "again"),
    [
        ("one", 25),
        pytest.param("FSDP-2", 15, marks=pytest.mark.slow),
        pytest.param("DDP-2", 20, marks=pytest.mark.slow),
    ],
)
def test_an_overflow_skips_the_update_and_a_resumed_run_has_the_same_bits(
    trained, start, tmp_path, shape, again
):
    """Resumed from a snapshot after the overflows, or between them."""
    run_dir = begun_with_a_large_scale(trained(shape, "fp16"), tmp_path / "through")
    result = start(shape, "fp16", run_dir, *OFTEN)
    assert result.returncode == 0, result.stderr
    assert_overflowed(result, run_dir)
    resumed = copied(run_dir, again, tmp_path / "run")
    result = start(shape, "fp16", resumed)
    assert result.returncode == 0, result.stderr
    assert f"step-{again:08d}, the newest of this run" in result.stdout
    runs.assert_same_bits(runs.snapshot(run_dir, STEPS), runs.snapshot(resumed, STEPS))
    states = [state_of(place, STEPS) for place in (run_dir, resumed)]
    for entry in ("loss_scaler", "skipped_steps", "best_loss"):
        assert states[0][entry] == states[1][entry]
    for one, other in zip(runs.metrics(run_dir), runs.metrics(resumed), strict=True):
        assert {**one, "tokens_per_second": 0} == {**other, "tokens_per_second": 0}


def assert_overflowed(result, run_dir: Path) -> None:
    """The run has skipped the updates of its first steps, and has counted them."""
    records = runs.metrics(run_dir)
    skipped = [record["step"] for record in records if record.get("skipped")]
    count = len(skipped)
    assert skipped[:5] == [11, 12, 13, 14, 15]
    assert 5 < count < 15
    for record in records:
        assert (record["grad_norm"] is None) == (record["step"] in skipped)
        assert record["loss"] > 0
    # Five skipped updates leave weights and optimizer as they were, bit for bit.
    runs.assert_same_bits(runs.snapshot(run_dir, 10), runs.snapshot(run_dir, 15))
    for step in (15, 20, 25, STEPS):
        state = state_of(run_dir, step)
        so_far = sum(number <= step for number in skipped)
        assert state["skipped_steps"] == so_far
        assert state["loss_scaler"]["scale"] == TOO_LARGE / 2**so_far
    tensors = runs.tensors(runs.snapshot(run_dir, STEPS))
    updates = {int(tensor) for name, tensor in tensors.items() if name.endswith(".step")}
    assert updates == {STEPS - count}
    lines = result.stdout.splitlines()
    assert ", 1 skipped, " in next(line for line in lines if line.startswith("step 11/30"))
    assert f", {count} skipped, " in next(line for line in lines if line.startswith("step 30/30"))
    assert f"skipped   {count} of 30 updates, which overflowed fp16" in lines


@pytest.mark.thorough
def test_too_many_overflows_in_a_row_stop_the_run(trained, start, tmp_path):
    run_dir = begun_with_a_large_scale(trained("FSDP-2", "fp16"), tmp_path / "run")
    result = start("FSDP-2", "fp16", run_dir, "train.max_skipped_steps=3")
    assert result.returncode != 0
    sentence = (
        "stopped: the gradient has overflowed fp16 in 4 steps in a row, up to step 14: more than "
        "train.max_skipped_steps=3. The last good snapshot stays: "
    )
    assert result.stderr.count(f"{sentence}{runs.snapshot(run_dir, 10)}") == 1
    assert "main(config)" not in result.stderr  # a traceback of ours
    assert snapshot_folders(run_dir / "snapshots") == [runs.snapshot(run_dir, 10)]
    verify(runs.snapshot(run_dir, 10))
    assert [record["step"] for record in runs.metrics(run_dir)][-1] == 13


# The shape, whether each block is compiled by itself, and by what. What inductor compiles well is
# right with aot_eager too, which takes a third of the time and no compiler.
HAS_COMPILER = shutil.which("g++") or shutil.which("clang++")
NEEDED = pytest.mark.skipif(not HAS_COMPILER, reason="inductor needs a C++ compiler")
COMPILED = [
    pytest.param("one", False, "aot_eager", marks=pytest.mark.slow),
    ("one", True, "aot_eager"),
    pytest.param("DDP-2", True, "aot_eager", marks=pytest.mark.slow),
    pytest.param("FSDP-2", True, "aot_eager", marks=pytest.mark.slow),
    pytest.param("FSDP-2", False, "aot_eager", marks=pytest.mark.slow),
    pytest.param("one", True, "inductor", marks=[NEEDED, pytest.mark.slow]),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("shape", "by_block", "backend"), COMPILED)
def test_compiled_runs_have_the_same_losses_and_tensor_names(
    trained, start, tmp_path, shape, by_block, backend
):
    entries = {"backend": backend.upper(), "use_regional_compilation": by_block}
    changes = {f"dynamo_{name}": value for name, value in entries.items()}
    result = start(shape, "no", tmp_path / "run", **changes)
    assert result.returncode == 0, result.stderr
    assert f"compiled {'by block' if by_block else 'whole'} with {backend}" in result.stdout
    plain = trained("one", "no")
    difference = largest_difference(runs.losses(plain), runs.losses(tmp_path / "run"))
    print(f"largest relative difference, {backend}, {shape}: {difference:.1e}")
    assert difference < 1e-5
    held_out = [runs.metrics(d, "eval")[-1]["loss"] for d in (plain, tmp_path / "run")]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)
    names = [set(runs.tensors(runs.snapshot(d, STEPS))) for d in (plain, tmp_path / "run")]
    assert names[0] == names[1]
