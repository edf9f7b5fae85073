"""What FSDP must not change: snapshots, resumes, evaluation, samples and the end."""

from __future__ import annotations

import random
import re
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM

import runs
from kills import after_a_rename, kill_at
from snapshot.disk.folder import read_json, verify

PIECE_BYTES = 1_000_000


@pytest.fixture(scope="module")
def launch(small, tmp_path_factory):
    """Launch a shipped config file on so many processes; the run must be made by all of them."""
    folder = tmp_path_factory.mktemp("configs")

    def launch(config, processes, *words):
        path = runs.rehearsal(config, folder, processes)
        result = runs.launch(path, *small, *words, code=0)
        assert f"{processes} processes, CPU" in result.stdout
        assert (", FSDP\n" in result.stdout) == config.startswith("fsdp")
        return result

    return launch


@pytest.fixture(scope="module")
def large_run(launch, tmp_path_factory):
    """The words and the directory of an FSDP run of two steps whose snapshot is in pieces."""
    run_dir = tmp_path_factory.mktemp("large") / "run"
    words = (
        "model.n_layer=4",
        "model.n_embd=128",
        "train.max_steps=2",
        f"snapshot.piece_bytes={PIECE_BYTES}",
        f"run.dir={run_dir}",
    )
    launch("fsdp_cpu.yaml", 2, *words)
    return words, run_dir


@torch.no_grad()
def test_a_snapshot_in_pieces_is_a_transformers_model(large_run):
    folder = runs.snapshot(large_run[1], 2)
    verify(folder)
    for stem, least in (("model", 4), ("optimizer", 7)):
        pieces = sorted(path.name for path in folder.glob(f"{stem}-*.safetensors"))
        assert len(pieces) >= least
        index = read_json(folder / f"{stem}.safetensors.index.json")
        assert sorted(set(index["weight_map"].values())) == pieces
        for piece in pieces:
            assert (folder / piece).stat().st_size < PIECE_BYTES + 10_000  # the header's share
    names = read_json(folder / "model.safetensors.index.json")["weight_map"]
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names  # tied: stored once

    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    ours, _ = runs.loaded(folder)  # with the GELU that the snapshot names
    assert ours.lm_head.weight is ours.transformer.wte.weight
    ids = torch.randint(ours.config.vocab_size, (3, ours.config.block_size))
    assert torch.allclose(ours(ids), theirs(ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        pytest.param((), {}, marks=pytest.mark.thorough, id="float32"),
        pytest.param((), {"mixed_precision": "fp16"}, marks=pytest.mark.slow, id="fp16"),
        pytest.param((), {"dynamo_backend": "AOT_EAGER"}, marks=pytest.mark.slow, id="compiled"),
        pytest.param(("model.lora_rank=4",), {}, marks=pytest.mark.slow, id="adapters"),
    ],
)
def test_a_run_that_sends_once_a_step_is_killed_and_ends_with_the_same_bits(
    small, finished_run, tmp_path, words, changes
):
    words = [
        *small,
        *words,
        "run.sync_each_micro_batch=false",
        "train.micro_batch_size=1",
        "model.dropout=0.1",
    ]
    if "model.lora_rank=4" in words:
        own = [word for word in words if not word.startswith(("model.n_", "model.dropout"))]
        words = [*own, f"model.pretrained={runs.snapshot(finished_run, 30)}"]
    config = runs.rehearsal("fsdp_cpu.yaml", tmp_path, 2, **changes)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    whole = runs.launch(config, *words, f"run.dir={undisturbed}", code=0)
    assert "whole weights and gradients over a step's micro-batches" in whole.stdout
    assert ("compiled" in whole.stdout) == ("dynamo_backend" in changes)
    again = runs.launch_command(config, *words, f"run.dir={killed}")
    assert kill_at(again, after_a_rename(killed, random.Random(1)), tmp_path / "said")
    rest = runs.run(again, code=0)
    assert "the newest of this run" in rest.stdout
    runs.assert_same_bits(runs.snapshot(undisturbed, 30), runs.snapshot(killed, 30))
    assert runs.losses(killed) == runs.losses(undisturbed)


def samples(result: subprocess.CompletedProcess) -> list[tuple[str, str]]:
    """The step and the text of each."""
    found = r"----- sample at step (\d+) -----\n(.*?)\n-----\n"
    return re.findall(found, result.stdout, re.DOTALL)


def assert_same_samples(several: subprocess.CompletedProcess, one: subprocess.CompletedProcess):
    """Of several processes and of one. Several on a slow machine may have had no time for all."""
    for (step, text), (other, whole) in zip(samples(several), samples(one), strict=True):
        assert step == other
        assert len(text) > 50
        assert whole.startswith(text)


@pytest.mark.thorough
def test_samples_and_held_out_losses_of_three_are_those_of_one(launch, small, tmp_path):
    words = (
        "train.global_batch_size=12",
        "train.max_steps=6",
        "train.sample_every=3",
        "train.eval_every=1",  # the first one leaves FSDP's last group gathered
        "snapshot.every=6",
    )
    three = launch("fsdp_cpu.yaml", 3, *words, f"run.dir={tmp_path / 'three'}")
    one = runs.train(*small, *words, f"run.dir={tmp_path / 'one'}", code=0)
    characters = int(re.search(r"([\d,]+) held out", one.stdout)[1].replace(",", ""))
    assert -(-(characters - 1) // 16) % 3 != 0  # windows that three cannot share equally
    assert [step for step, _ in samples(one)] == ["3", "6"]
    assert all(len(text) > 300 for _, text in samples(one))
    assert_same_samples(three, one)
    held_out = [runs.metrics(tmp_path / name, "eval") for name in ("one", "three")]
    assert [record["step"] for record in held_out[1]] == [1, 2, 3, 4, 5, 6]
    for expected, found in zip(*held_out, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_short_runs_in_a_row_all_end_well(launch, tmp_path):
    """Processes over gloo that are not let go of in order abort at about every second end."""
    for number in range(10):
        words = ("train.max_steps=2", f"run.dir={tmp_path / str(number)}")
        launch("fsdp_cpu.yaml", 2, *words)
