"""Spaces of random models for the tests, and their JavaScript in node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from browser.space import make_space
from data.tokenizer import Tokenizer
from runs import ROOT

CALLS = ROOT / "tests" / "support" / "space_in_node.mjs"
INSTALL = "apt-get install nodejs"
DEADLINE_SECONDS = 600
CONTEXT = 24


def random_model(folder: Path, tokenizer: Tokenizer, **entries: object) -> Path:
    """Save a random GPT-2 of transformers with a tokenizer; the folder.

    Its weights are large enough for logits that differ, and no bias is 0.
    """
    torch.manual_seed(7)
    sizes = {"n_embd": 36, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(vocab_size=tokenizer.vocab_size, **{**sizes, **ends, **entries})
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def space_of(model: Path, folder: Path) -> Path:
    """The Space of a model, in a new folder."""
    make_space(str(model), str(folder), public=False)
    return folder


def in_node(space: Path, *calls: tuple) -> list[Any]:
    """What calls of space_in_node.mjs return; the test is skipped if there is no node."""
    if shutil.which("node") is None:
        pytest.skip(f"needs node: {INSTALL}")
    # Without it node 18 takes files for scripts that a page takes for modules.
    (space.parent / "package.json").write_text('{"type": "module"}')
    done = subprocess.run(
        ["node", str(CALLS), str(space)],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
