"""Runs on conversations: any shape, exact resume, and what is learned."""

from __future__ import annotations

import json
import subprocess

import pytest

import chats
import runs
from snapshot.disk.folder import read_json

NOUNS = ["run", "step", "loss", "token", "batch", "epoch", "rank", "text", "block", "seed"]
VERBS = ["goes on", "is done"]
KNOWN = [
    chats.said(f"{noun}, {verb}?", f"the {noun[::-1]} {verb} {i}.")
    for i, (noun, verb) in enumerate((noun, verb) for noun in NOUNS for verb in VERBS)
]
"""Twenty conversations."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return chats.make("llama tied", tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """Sixty conversations of one to three questions."""
    several = [KNOWN[i % 20] + KNOWN[i * 7 % 20] * (i % 3 == 0) for i in range(60)]
    return chats.write(tmp_path_factory.mktemp("text") / "chat.jsonl", several)


def words(small, base, source, *more):
    own = [one for one in small if not one.startswith(("model.n_", "data.source", "data.block"))]
    return [
        *own,
        f"model.pretrained={base}",
        f"data.source={source}",
        "data.documents=conversations",
        "data.block_size=48",
        "train.max_steps=12",
        "train.eval_every=6",
        "snapshot.every=6",
        *more,
    ]


@pytest.fixture(scope="module")
def alone(small, base, conversations, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    result = runs.train(*words(small, base, conversations, f"run.dir={run_dir}"), code=0)
    assert "60 conversations in " in result.stdout
    return run_dir


def test_an_evaluation_has_the_number_of_the_run(alone):
    command = runs.command(str(alone), "--json", script="evaluate.py")
    result = runs.run(command, code=0)
    found, last = json.loads(result.stdout), runs.metrics(alone, "eval")[-1]
    assert found["loss"] == pytest.approx(last["loss"], abs=1e-5)
    assert found["bits_per_byte"] == pytest.approx(last["bits_per_byte"], abs=1e-5)
    assert found["tokens"] == found["tokens_of_text"]
    state = read_json(runs.snapshot(alone, 12) / "state.json")
    assert found["tokens"] == state["data"]["held_out_tokens"]
    refused = runs.run(runs.command(str(alone), "--block-size", "24", script="evaluate.py"), code=2)
    assert "--block-size=24 is not the run's data.block_size=48" in refused.stderr


def test_a_run_does_not_change_its_documents(small, base, conversations, alone):
    changed = words(small, base, conversations, f"run.dir={alone}", "data.documents=masked")
    result = runs.train(*changed, "data.text_column=messages", "train.max_steps=13", code=2)
    assert "data.documents: conversations in the snapshot, masked now" in result.stderr


@pytest.mark.slow
def test_a_model_repeats_twenty_learned_conversations(small, base, tmp_path):
    source = chats.write(tmp_path / "chat.jsonl", [*KNOWN, KNOWN[0], KNOWN[1]])
    learn = [
        "optim.learning_rate=0.01",
        "optim.min_learning_rate=0.0001",
        "optim.weight_decay=0.0",
        "train.max_steps=300",
        "train.eval_every=300",
        "snapshot.every=300",
        "train.global_batch_size=10",
        "data.val_fraction=0.09",
    ]
    runs.train(*words(small, base, source, *learn), f"run.dir={tmp_path / 'run'}", code=0)
    command = [str(tmp_path / "run"), "--chat", "--temperature", "0", "--length", "30"]
    found = subprocess.run(
        runs.command(*command, script="sample.py"),
        input="".join(f"{question['content']}\n\n" for question, _ in KNOWN),
        capture_output=True,
        text=True,
        check=True,
        timeout=runs.DEADLINE_SECONDS,
        env=runs.environment(),
        cwd=runs.ROOT,
    )
    out = found.stdout
    assert out.splitlines() == [answer["content"] for _, answer in KNOWN]
