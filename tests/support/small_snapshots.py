"""Snapshots of a tiny model that is trained in the test's own process."""

from __future__ import annotations

import torch

from config.compose import load_config
from config.schema import OptimConfig
from config.stored import as_plain
from data.tokenizer import CharTokenizer
from model.gpt import GPT, GPTConfig
from snapshot.disk.save import Snapshot
from snapshot.disk.state import RunState
from training.step import make_optimizer

SHAPE = GPTConfig(vocab_size=7, block_size=6, n_layer=2, n_head=2, n_embd=8)


TOKENIZER = CharTokenizer("abcdefg")
CONFIG = as_plain(load_config(["optim.name=adamw"]))


def trained(steps: int, seed: int = 0) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = GPT(SHAPE)
    optimizer = make_optimizer(model, OptimConfig(), torch.device("cpu"), "no")
    for _ in range(steps):
        ids = torch.randint(SHAPE.vocab_size, (2, SHAPE.block_size))
        model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_at(step: int, data: dict | None = None, **optim) -> RunState:
    """The state of a run with AdamW, or with other keys of `optim`, after so many steps."""
    config = {**CONFIG, "optim": {**CONFIG["optim"], **optim}}
    return RunState("a" * 32, "b" * 32, step, 0, 1337, None, config, data or {})


def write(root, step, model, optimizer, piece_bytes=10**9):
    save, state = TOKENIZER.save, state_at(step)
    snapshot = Snapshot(root, state, model, optimizer, save, piece_bytes=piece_bytes)
    return snapshot.write()
