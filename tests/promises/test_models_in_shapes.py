"""Promises 1 and 2 as a table: every kind of model in every shape has the numbers of one process.

With accumulation, clipping and documents that do not attend to each other.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import families
import runs
from families import BALANCED
from runs import CONSTANT, relative_difference
from shapes import MORE_SHAPES, SHAPES

BATCH, STEPS, LARGEST_NORM = 8, 30, 1.2
MODELS = ["gpt", "llama_tiny", "llama", "qwen3", "mixtral"]
RING = ["1", "tp 2", "FSDP 2", "tp 2 x shard 2", "cp 2", "DDP 2", "cp 2 x tp 2", "hybrid 2 x 2"]
RING += ["cp 2 x shard 2", "1"]


@pytest.fixture(scope="module")
def words(small, text_file, tmp_path_factory):
    """The overrides of a model's run, on sequences of several documents."""
    root = tmp_path_factory.mktemp("models")
    lines = text_file.read_text(encoding="utf-8").splitlines()
    documents = [line[: 7 + 11 * number % 40] for number, line in enumerate(lines)]
    text = root / "documents.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    shared = [word for word in small if not word.startswith("data.source")]
    shared += [*CONSTANT, f"data.source={text}", "data.documents=masked"]
    shared += [f"optim.max_grad_norm={LARGEST_NORM}", "model.n_head=4"]  # "cp 2 x tp 2" divides it

    @cache
    def words(model):
        if model == "gpt":
            return shared
        own = [word for word in shared if not word.startswith("model.n_")]
        if model == "llama_tiny":
            return [*own, "model=llama_tiny"]
        base = families.make(model, root / model, **(BALANCED if model == "mixtral" else {}))
        return [*own, f"model.pretrained={base}"]

    return words


@pytest.fixture(scope="module")
def alone(words, tmp_path_factory):
    """The run of one process without accumulation, made when asked for."""
    root = tmp_path_factory.mktemp("alone")

    @cache
    def alone(model):
        result = runs.train(*words(model), f"run.dir={root / model}")
        assert result.returncode == 0, result.stderr
        assert f"{BATCH} sequences x 1 process x 1 accumulated" in result.stdout
        return root / model

    return alone


@pytest.fixture
def run_in(words, tmp_path):
    """Train a model in a shape up to a step; returns what is printed."""

    def run_in(model, shape, run_dir, last=STEPS):
        chosen = {**SHAPES, **MORE_SHAPES}[shape]
        more = [f"train.micro_batch_size={BATCH // chosen.groups // 2}", f"train.max_steps={last}"]
        result = runs.launch(chosen.file(tmp_path), *words(model), *more, f"run.dir={run_dir}")
        assert result.returncode == 0, result.stderr
        assert chosen.is_named_in(result.stdout)
        assert "2 accumulated" in result.stdout
        return result.stdout

    return run_in


def differences(one: Path, other: Path) -> tuple[float, float, float]:
    """The largest relative ones: of the first step's loss, of losses, of gradient norms."""
    losses = [runs.losses(run_dir) for run_dir in (one, other)]
    norms = [[record["grad_norm"] for record in runs.metrics(run)] for run in (one, other)]
    if "mixtral" in one.parts:  # a part of its loss
        uneven = [[row["load_balancing_loss"] for row in runs.metrics(run)] for run in (one, other)]
        assert relative_difference(*uneven) < 1e-5
    assert len(losses[0]) == STEPS
    assert max(norms[0]) > LARGEST_NORM
    return (
        relative_difference(losses[0][:1], losses[1][:1]),
        relative_difference(*losses),
        relative_difference(*norms),
    )


def shapes_of(model: str) -> list[str]:
    """Of a mixture, no processes share the matrices."""
    return [shape for shape in RING if not (model == "mixtral" and "tp" in shape)]


ROWS = [(model, shape) for model in MODELS for shape in dict.fromkeys(shapes_of(model))]
ROWS += [("gpt", shape) for shape in MORE_SHAPES]
IN_CI = [("qwen3", "tp 2"), ("mixtral", "cp 2")]


def marks(row: tuple[str, str]) -> pytest.MarkDecorator:
    """CI runs two models of transformers: shared matrices, and a mixture's shared sequences."""
    return pytest.mark.thorough if row in IN_CI else pytest.mark.slow


@pytest.mark.parametrize(("model", "shape"), [pytest.param(*row, marks=marks(row)) for row in ROWS])
def test_every_model_has_the_losses_of_one_process(run_in, alone, tmp_path, model, shape):
    run_in(model, shape, tmp_path / "run")
    first, losses, norms = differences(alone(model), tmp_path / "run")
    held_out = [
        [record["loss"] for record in runs.metrics(run_dir, "eval")]
        for run_dir in (alone(model), tmp_path / "run")
    ]
    evaluated = relative_difference(*held_out)
    print(f"| {model} | {shape} | {first:.1e} | {losses:.1e} | {norms:.1e} | {evaluated:.1e} |")
    assert first < 1e-6
    assert max(losses, norms, evaluated) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
def test_a_run_goes_through_all_shapes(run_in, alone, tmp_path, model):
    """Each resumes from the snapshot of the one before. All pairs: test_any_snapshot.py."""
    assert {*RING} == {*SHAPES}
    shapes, last = shapes_of(model), 0
    for number, shape in enumerate(shapes, 1):
        begin, last = last, number * STEPS // len(shapes)
        said = run_in(model, shape, tmp_path / "run", last)
        if begin:
            assert f"step-{begin:08d}, the newest of this run" in said
            assert "but the last bits of sums may differ" in said
    first, losses, norms = differences(alone(model), tmp_path / "run")
    print(f"| {model} | all | {first:.1e} | {losses:.1e} | {norms:.1e} |")
    assert max(first, losses, norms) < 1e-5
