"""plan.py: what it predicts is what a run measures, and its table says what it must."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import runs
from model.gpt import GPT, GPTConfig
from training.config import OptimConfig
from training.fits import GIB, Candidate, candidates, strategies
from training.ledger import LiveBytes
from training.optimizer import adamw
from training.pretend import DTYPES, Shape, traced_update
from training.survey import survey

TINY = GPTConfig(103, 64, n_layer=4, n_head=4, n_embd=128)
CLAIM = ["data.block_size=1024", "train.global_batch_size=64", "--vocab-size", "50257"]
TWO_OF_24 = [*CLAIM, "--processes", "2", "--memory", "24", "--json"]


def plan(*words: str) -> subprocess.CompletedProcess:
    return runs.run([sys.executable, str(runs.ROOT / "plan.py"), *words])


def counted_update(config: GPTConfig, batch: int, precision: str) -> int:
    """The peak of a real update of two micro-batches, after one that made the optimizer's state."""
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = adamw(model, OptimConfig(), torch.device("cpu"))
    ids = torch.randint(config.vocab_size, (batch, config.block_size))
    tracker = LiveBytes()
    tracker.mark(model.parameters(), "parameters")
    with tracker:
        for update in range(2):
            tracker.place = ("update", update)
            for _ in range(2):
                with torch.autocast("cpu", DTYPES[precision], enabled=precision != "no"):
                    loss = model(ids, ids)
                (loss.float() / 2).backward()
                del loss
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    totals = tracker.ledger.totals().sum(axis=1)
    places = tracker.ledger.places
    return max(int(t) for t, place in zip(totals, places, strict=True) if place == ("update", 1))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_predicted_peak_is_the_one_of_a_real_update(dropout, precision, checkpointing):
    config = GPTConfig(103, 64, 3, 4, 64, dropout, checkpointing)
    predicted = survey(config, Shape("cpu", precision)).peak(3, accumulating=True)
    counted = counted_update(config, 3, precision)
    print(f"predicted {predicted / 1e6:.3f} MB, counted {counted / 1e6:.3f} MB")
    assert predicted == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(
    ("device", "processes", "shards", "checkpointing"),
    [("cuda", 1, 1, True), ("cuda", 2, 1, False), ("cpu", 3, 3, False), ("cuda", 4, 2, True)],
)
def test_a_deep_model_needs_what_its_shallow_traces_say(device, processes, shards, checkpointing):
    """Four small traces give the peak of a model of nine layers, at any micro-batch."""
    config = GPTConfig(103, 64, 9, 4, 64, 0.1 if device == "cuda" else 0.0, checkpointing)
    shape = Shape(device, "bf16", processes, shards)
    surveyed = survey(config, shape)
    for batch in (1, 8):
        traced = traced_update(config, batch, shape).ledger.totals().sum(axis=1).max()
        assert surveyed.peak(batch, accumulating=True) == pytest.approx(traced, rel=5e-3)


def test_activation_checkpointing_lowers_the_counted_peak():
    config = GPTConfig(103, 128, 6, 4, 64, 0.1)
    smaller = GPTConfig(103, 128, 6, 4, 64, 0.1, activation_checkpointing=True)
    peaks = [counted_update(shape, 8, "no") for shape in (config, smaller)]
    print(f"counted peaks: {peaks[0] / 1e6:.1f} MB without, {peaks[1] / 1e6:.1f} MB with")
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.parametrize(
    ("config", "processes", "shards"), [("cpu.yaml", 1, 1), ("fsdp_cpu.yaml", 2, 2)]
)
def test_the_predicted_peak_is_the_one_of_train_py(small, tmp_path, config, processes, shards):
    """Of the real program under the real launcher, counted in each process."""
    sizes = ["model.n_layer=3", "model.n_embd=64", "data.block_size=64"]
    words = runs.launch_command(runs.rehearsal(config, tmp_path, processes), *small, *sizes)
    words[words.index(str(runs.ROOT / "train.py"))] = str(runs.ROOT / "benchmarks" / "measured.py")
    words.insert(words.index(str(runs.ROOT / "benchmarks" / "measured.py")) + 1, str(tmp_path))
    result = runs.run([*words, "train.micro_batch_size=2", f"run.dir={tmp_path / 'run'}"])
    assert result.returncode == 0, result.stderr
    found = [json.loads((tmp_path / f"{n}.json").read_text()) for n in range(processes)]
    assert [process["processes"] for process in found] == [processes] * processes
    vocabulary = json.loads(
        (tmp_path / "run" / "snapshots" / "step-00000030" / "config.json").read_text()
    )
    model = GPTConfig(vocabulary["vocab_size"], 64, 3, 2, 64)
    surveyed = survey(model, Shape("cpu", "no", processes, shards))
    counted = max(process["peak"] for process in found)
    print(f"{surveyed.peak(2, True) / 1e6:.3f} MB predicted, {counted / 1e6:.3f} MB counted")
    assert surveyed.peak(2, accumulating=True) == pytest.approx(counted, rel=0.1)
    for kind in ("parameters", "gradients", "optimizer"):
        assert surveyed.largest(kind, 2, True) == pytest.approx(found[0][kind], rel=0.01)


def test_fsdp_shares_what_ddp_copies():
    """Parameters, gradients and optimizer state: 1/N and at most five percent of padding."""
    whole = survey(TINY, Shape("cuda", "bf16", 4, 1))
    for shards in (2, 4):
        part = survey(TINY, Shape("cuda", "bf16", 4, shards))
        for kind in ("parameters", "gradients", "optimizer"):
            assert part.largest(kind, 1, True) <= 1.05 / shards * whole.largest(kind, 1, True)


def test_communication_is_that_of_the_ring_algorithms():
    size = sum(p.numel() for p in GPT(TINY).parameters())
    ddp = survey(TINY, Shape("cuda", "no", 4, 1))
    assert ddp.sent(1) == ddp.sent(8) == pytest.approx(2 * 3 / 4 * 4 * size, rel=1e-6)
    fsdp = survey(TINY, Shape("cuda", "no", 4, 4))
    # Gathered for the forward pass and, the blocks, for the backward pass; gradients scattered.
    assert 2.5 * 3 / 4 * 4 * size < fsdp.sent(1) < 3.1 * 3 / 4 * 4 * size
    assert fsdp.sent(3) == pytest.approx(3 * fsdp.sent(1))
    hybrid = survey(TINY, Shape("cuda", "no", 4, 2))
    assert hybrid.sent(1) == pytest.approx(
        fsdp.sent(1) * (1 / 2) / (3 / 4) + 4 * size / 2, rel=0.02
    )


def test_the_published_claim_for_two_gpus_of_24_gib():
    large, xl = (
        json.loads(plan(f"model={m}", *TWO_OF_24).stdout) for m in ("gpt2_large", "gpt2_xl")
    )
    largest = {row["strategy"]["name"]: row["largest_micro_batch"] for row in large["fits"]}
    assert largest["FSDP"] > largest["DDP"] > 0
    largest = {row["strategy"]["name"]: row["largest_micro_batch"] for row in xl["fits"]}
    assert largest["DDP"] == 0
    assert largest["FSDP"] >= 1
    assert xl["parameters"] == 1_557_611_200
    assert "accelerate_configs/fsdp.yaml" in xl["advice"]


def test_the_table_names_a_shipped_config_for_each_strategy():
    shown = set()
    for device in ("cuda", "cpu"):
        for processes, machines in ((1, 1), (4, 1), (8, 2)):
            shape = Shape(device, "bf16", processes)
            shown |= {strategy.config for strategy in strategies(shape, machines)}
    shipped = {path.name for path in (runs.ROOT / "accelerate_configs").iterdir()}
    assert shown == shipped


def test_what_train_py_refuses_is_not_offered():
    found = [strategy.name for strategy in strategies(Shape("cuda", "fp16", 4), 1)]
    assert found == ["DDP", "FSDP"]


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    for candidate in candidates(TINY, Shape("cuda", "bf16", 2), 1):
        assert isinstance(candidate, Candidate)
        most = candidate.largest(1.5 * GIB)
        assert candidate.needed(most, True) <= 1.5 * GIB < candidate.needed(most + 1, True)


def test_the_plan_says_what_fits_and_what_to_run():
    result = plan("--processes", "2", "--memory", "8")
    assert result.returncode == 0, result.stderr
    assert "It fits: accelerate launch --config_file accelerate_configs/ddp.yaml" in result.stdout
    assert "snapshot.keep=3" in result.stdout
    for head in ("weights", "gradients", "optimizer", "activations", "peak", "sent a step"):
        assert head in result.stdout


def test_nothing_that_fits_is_exit_code_1_with_a_remedy():
    result = plan("model=gpt2", "--memory", "1")
    assert result.returncode == 1
    assert "Nothing fits" in result.stdout
    assert "model.activation_checkpointing=true" in result.stdout
    result = plan("train.micro_batch_size=12", "data.block_size=1024", "--memory", "1")
    assert result.returncode == 1
    assert "train.micro_batch_size=12 does not fit. one process takes" in result.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model=gtp2", "--memory", "8"], "nearest is gpt2"),
        (["--processes", "5", "--memory", "8"], "train.global_batch_size=12 cannot be shared"),
        (
            ["--processes", "3", "--machines", "2", "--memory", "8"],
            "not a multiple of --machines 2",
        ),
        (["--memory", "a lot"], "a lot is not a number of GiB"),
        ([], "--memory"),
    ],
)
def test_wrong_input_gets_a_sentence_and_exit_code_2(words, sentence):
    result = plan(*words)
    assert result.returncode == 2
    assert sentence in result.stderr
