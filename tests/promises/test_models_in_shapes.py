"""Promises 1, 2 and 6 as a table: every kind of run in every shape has the numbers of one process.

With accumulation and clipping, and for models with documents that do not attend to each other.
Resumed, a run of each kind ends with the bits of one that was not stopped.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest

import chats
import families
import runs
from families import BALANCED
from runs import CONSTANT, relative_difference
from shapes import MORE_SHAPES, SHAPES

BATCH, STEPS, LARGEST_NORM = 8, 30, 1.2
LORA = "model.lora_rank=4"
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
"""Rows of whole blocks of four-bit numbers."""
MODELS = ["gpt", "llama_tiny", "llama", "qwen3", "mixtral"]
KINDS: dict[str, list[str]] = {
    "subwords": ["data.tokenizer=bpe:300"],
    "narrow": ["model.n_embd=16"],  # than its vocabulary: the loss is taken of pieces of logits
    "conversations": ["data.documents=conversations", "data.block_size=48"],
    "frozen": ['optim.freeze=["*.wpe.*","*.h.0.*"]', "model.frozen_dtype=bf16"],
    "architecture": [],
    "gpt2 other": [],
    "adapters of a run": [LORA],
    "adapters": [LORA],
    "four bits": [LORA, "model.frozen_dtype=nf4"],
}
"""Other kinds of runs, and their own overrides."""
OF_TRANSFORMERS = ("llama", "qwen3", "mixtral", "gpt2 other")
RING = ["tp 2", "FSDP 2", "tp 2 x shard 2", "cp 2", "DDP 2", "cp 2 x tp 2", "hybrid 2 x 2"]
RING += ["cp 2 x shard 2", "1"]


@pytest.fixture(scope="module")
def words(small, text_file, finished_run, tmp_path_factory):
    """The overrides of a kind of run."""
    root = tmp_path_factory.mktemp("models")
    lines = text_file.read_text(encoding="utf-8").splitlines()
    documents = [line[: 7 + 11 * number % 40] for number, line in enumerate(lines)]
    text = root / "documents.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    asked = [
        chats.said(f"{one}?", *[f"it is {one}.", "and?", "so."][: 1 + n % 3 // 2 * 2])
        for n, one in enumerate(documents[:60])
    ]
    masked = [f"data.source={text}", "data.documents=masked"]
    masked += [f"optim.max_grad_norm={LARGEST_NORM}"]
    four_heads = "model.n_head=4"  # "cp 2 x tp 2" divides it

    @cache
    def words(kind):
        own = [*small, *CONSTANT, *KINDS.get(kind, masked)]
        if kind in ("gpt", "subwords", "narrow", "frozen"):
            return [*own, four_heads]
        own = [word for word in own if not word.startswith("model.n_")]
        folder = root / kind.replace(" ", "-")
        match kind:
            case "llama_tiny":
                return [*own, "model=llama_tiny"]
            case "architecture":
                return [*own, f"model.architecture={families.make('llama', folder)}"]
            case "adapters of a run":
                base = finished_run
            case "conversations":
                own.append(f"data.source={chats.write(root / 'chat.jsonl', asked)}")
                base = chats.make("llama tied", folder)
            case "adapters":
                base = families.make("llama tied", folder, dtype="bfloat16")
            case "four bits":
                base = families.make("llama", folder, dtype="bfloat16", **WIDE)
            case _:
                base = families.make(kind, folder, **(BALANCED if kind == "mixtral" else {}))
        return [*own, f"model.pretrained={base}"]

    return words


@pytest.fixture(scope="module")
def alone(words, tmp_path_factory):
    """The run of one process without accumulation, made when asked for."""
    root = tmp_path_factory.mktemp("alone")

    @cache
    def alone(kind):
        result = runs.train(*words(kind), f"run.dir={root / kind}", code=0)
        assert f"{BATCH} sequences x 1 process x 1 accumulated" in result.stdout
        return root / kind

    return alone


@pytest.fixture
def run_in(words, tmp_path):
    """Train in a shape."""

    def run_in(kind, shape, run_dir):
        chosen = {**SHAPES, **MORE_SHAPES}[shape]
        more = [f"train.micro_batch_size={BATCH // chosen.groups // 2}", f"run.dir={run_dir}"]
        result = runs.launch(chosen.file(tmp_path), *words(kind), *more, code=0)
        assert chosen.is_named_in(result.stdout)
        assert "2 accumulated" in result.stdout

    return run_in


def differences(one: Path, other: Path) -> tuple[float, float, float]:
    """The largest relative ones: of the first step's loss, of losses, of gradient norms."""
    losses = [runs.losses(run_dir) for run_dir in (one, other)]
    norms = [[record["grad_norm"] for record in runs.metrics(run)] for run in (one, other)]
    assert len(losses[0]) == STEPS
    assert max(norms[0]) > LARGEST_NORM or one.name in KINDS
    return (
        relative_difference(losses[0][:1], losses[1][:1]),
        relative_difference(*losses),
        relative_difference(*norms),
    )


ROWS = [
    (kind, shape)
    for kind in MODELS
    for shape in RING
    if not (kind == "mixtral" and ("tp" in shape or "cp" in shape))  # which nobody shares
]
ROWS += [("gpt", shape) for shape in MORE_SHAPES]
ROWS += [(kind, shape) for kind in KINDS for shape in ("DDP 2", "FSDP 2")]
QUICK = [("subwords", "DDP 2"), ("conversations", "DDP 2"), ("frozen", "FSDP 2")]
IN_CI = [("qwen3", "tp 2"), ("conversations", "FSDP 2"), ("narrow", "FSDP 2")]
IN_CI += [(kind, "FSDP 2") for kind in ("mixtral", "gpt2 other", "four bits", "adapters")]


def marks(row: tuple[str, str]) -> list[pytest.MarkDecorator]:
    """CI runs models of transformers: shared matrices, and a mixture."""
    if row in QUICK:
        return []
    return [pytest.mark.thorough if row in IN_CI else pytest.mark.slow]


@pytest.mark.parametrize(("kind", "shape"), [pytest.param(*row, marks=marks(row)) for row in ROWS])
def test_every_model_has_the_losses_of_one_process(run_in, alone, tmp_path, kind, shape):
    run_in(kind, shape, tmp_path / "run")
    first, losses, norms = differences(alone(kind), tmp_path / "run")
    held_out = [
        [record["loss"] for record in runs.metrics(run_dir, "eval")]
        for run_dir in (alone(kind), tmp_path / "run")
    ]
    evaluated = relative_difference(*held_out)
    print(f"| {kind} | {shape} | {first:.1e} | {losses:.1e} | {norms:.1e} | {evaluated:.1e} |")
    assert first < 1e-6
    assert max(losses, norms, evaluated) < 1e-5
    if kind in OF_TRANSFORMERS:
        families.assert_computed_by_transformers(runs.snapshot(tmp_path / "run", STEPS))


RESUMED_IN_CI = ("conversations", "adapters", "mixtral")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=pytest.mark.thorough if kind in RESUMED_IN_CI else pytest.mark.slow
        )
        if kind != "adapters of a run"
        else kind
        for kind in (*MODELS[1:], *KINDS)
    ],
)
def test_resumed_the_bits_are_those_of_an_uninterrupted_run(words, tmp_path, kind):
    """With dropout and recomputation. The text is prepared anew, as on an empty disk."""
    more = ["model.dropout=0.1", "train.max_steps=12", "snapshot.every=6"]
    more += [] if "adapters" in kind else ["model.activation_checkpointing=true"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    runs.train(*words(kind), *more, f"run.dir={whole}", code=0)
    shutil.copytree(whole, cut)
    shutil.rmtree(runs.snapshot(cut, 12))
    elsewhere = [f"data.cache_dir={tmp_path / 'cache'}", f"run.dir={cut}"]
    result = runs.train(*words(kind), *more, *elsewhere, code=0)
    assert "step-00000006, the newest of this run" in result.stdout
    runs.assert_same_bits(runs.snapshot(whole, 12), runs.snapshot(cut, 12))
    assert runs.losses(cut) == runs.losses(whole)
