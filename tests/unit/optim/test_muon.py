"""Muon: its updates, and what snapshots, other shapes, the planner and messages know of it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

import families
import runs
from config.schema import OptimConfig
from model.families import build_model
from model.gpt import GPT, GPTConfig
from model.lora import Lora
from optim.muon import ITERATIONS
from snapshot.disk.folder import read_json
from snapshot.disk.model import model_config
from training.step import make_optimizer

CPU = torch.device("cpu")
SHARED_UPDATES = runs.ROOT / "tests" / "support" / "shared_updates.py"
SIZES = GPTConfig(vocab_size=19, block_size=8, n_layer=2, n_head=2, n_embd=16)
OPTIM = OptimConfig(learning_rate=0.01, name="muon", weight_decay=0.3)
# A constant rate after the warm-up, as in the tests of promise 1.
CONSTANT = ("optim.learning_rate=1e-3", "optim.min_learning_rate=1e-3", "train.max_steps=20")


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(1)
    return GPT(SIZES)


def matrices(model: GPT) -> list[torch.nn.Parameter]:
    return [one for one in model.transformer.h.parameters() if one.dim() == 2]


def updates(model: GPT, optimizers: list[torch.optim.Optimizer], steps: int = 4) -> list:
    """The parameters after updates with random gradients."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


def test_updates_are_those_of_torch_s_muon_and_adamw(model):
    ours = updates(model, [make_optimizer(model, OPTIM, CPU, "bf16")])
    torch.manual_seed(1)
    model = GPT(SIZES)
    split = [one for one in matrices(model) if one.shape != (48, 16)]
    joined = [one for one in matrices(model) if one.shape == (48, 16)]
    parts = [torch.nn.Parameter(part) for one in joined for part in one.detach().chunk(3)]
    apart = {id(one) for one in matrices(model)}
    rest = [one for one in model.parameters() if id(one) not in apart]
    groups = [
        {"params": [one for one in rest if one.dim() == 2], "weight_decay": 0.3},
        {"params": [one for one in rest if one.dim() < 2], "weight_decay": 0.0},
    ]
    muon = torch.optim.Muon(
        [*split, *parts],
        lr=0.01,
        weight_decay=0.3,
        ns_steps=ITERATIONS,
        adjust_lr_fn="match_rms_adamw",
    )

    class Parts:
        """Gives each part of the joined matrices its part of the gradient."""

        def step(self) -> None:
            grads = [part for one in joined for part in one.grad.chunk(3)]
            for part, grad in zip(parts, grads, strict=True):
                part.grad = grad

    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.99), fused=True)
    theirs = updates(model, [Parts(), muon, adamw])
    for one, other in zip(ours, theirs, strict=True):
        assert one.equal(other)


def test_a_model_of_adapters_alone_is_trained(tmp_path):
    base = families.make("llama tied", tmp_path / "llama")
    config = model_config(read_json(base / "config.json"), "it")
    model = build_model(replace(config, lora=Lora(rank=2, alpha=4)))
    optimizer = make_optimizer(model, OPTIM, CPU, "no")
    trained = [one for one in model.parameters() if one.requires_grad]
    assert [one for group in optimizer.param_groups for one in group["params"]] == trained
    before = [one.detach().clone() for one in trained]
    for one in trained:
        one.grad = torch.ones_like(one)
    optimizer.step()
    assert not any(one.equal(other) for one, other in zip(before, trained, strict=True))


@pytest.fixture(scope="module")
def single(small, tmp_path_factory):
    """A run on one process, with snapshots at 10 and 20."""
    run_dir = tmp_path_factory.mktemp("muon") / "run"
    result = runs.train(*small, "optim.name=muon", *CONSTANT, f"run.dir={run_dir}")
    assert result.returncode == 0, result.stderr
    return run_dir


def test_a_resumed_run_ends_with_the_same_bits(single, small, tmp_path):
    resumed = tmp_path / "resumed"
    shutil.copytree(runs.snapshot(single, 10), runs.snapshot(resumed, 10))
    result = runs.train(*small, "optim.name=muon", *CONSTANT, f"run.dir={resumed}")
    assert result.returncode == 0, result.stderr
    assert [record["step"] for record in runs.metrics(resumed)] == list(range(11, 21))
    runs.assert_same_bits(runs.snapshot(single, 20), runs.snapshot(resumed, 20))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "processes"),
    [
        ("fsdp_cpu.yaml", 2),
        pytest.param("fsdp_hybrid.yaml", 4, marks=pytest.mark.slow),
        pytest.param("ddp_cpu.yaml", 2, marks=pytest.mark.slow),
    ],
)
def test_several_processes_have_the_losses_of_one_and_resume(
    single, small, tmp_path, config, processes
):
    hybrid = {"parallelism_config_dp_shard_size": 2} if processes == 4 else {}
    path = runs.rehearsal(config, tmp_path, processes, **hybrid)
    words = [*small, "optim.name=muon", *CONSTANT]
    result = runs.launch(path, *words, f"run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    expected = pytest.approx(runs.losses(single), rel=1e-5)
    assert f"{processes} processes" in result.stdout
    assert runs.losses(tmp_path / "run") == expected

    resumed = tmp_path / "resumed"
    shutil.copytree(single, resumed)
    shutil.rmtree(runs.snapshot(resumed, 20))
    result = runs.launch(path, *words, f"run.dir={resumed}")
    assert result.returncode == 0, result.stderr
    assert "step-00000010" in result.stdout
    assert runs.losses(resumed) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("copies", "shards", "parts"),
    [
        (1, 4, 1),
        (1, 2, 2),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, 1, 1), (2, 2, 1), (3, 1, 1))),
    ],
    ids=["FSDP 4", "FSDP 2 x tp 2", "DDP 2", "hybrid 2 x 2", "DDP 3"],
)
def test_processes_share_matrices_of_any_shape(tmp_path, copies, shards, parts):
    """Joined matrices, shards with fewer rows or none, and parameters without gradient."""
    processes = copies * shards * parts
    config = runs.rehearsal("ddp.yaml", tmp_path, processes)
    words = (str(copies), str(shards), str(parts))
    result = runs.run(runs.launch_command(config, *words, script=SHARED_UPDATES))
    assert result.returncode == 0, result.stderr
    found = [json.loads(one) for one in re.findall(r"\{.*?\}", result.stdout)]
    assert len(found) == processes
    assert len({one["bits"] for one in found}) == 1
    assert max(one["difference"] for one in found) < 1e-6
