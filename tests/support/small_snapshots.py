"""Snapshots of a tiny model that is trained in the test's own process."""

from __future__ import annotations

import torch

from config.schema import OptimConfig
from data.tokenizer import CharTokenizer
from model.gpt import GPT, GPTConfig
from snapshot.disk.state import RunState
from snapshot.disk.writing import Destination, begin_snapshot
from training.step import make_optimizer

SHAPE = GPTConfig(vocab_size=7, block_size=6, n_layer=2, n_head=2, n_embd=8)


TOKENIZER = CharTokenizer("abcdefg")


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


def state_at(step: int) -> RunState:
    return RunState("run", "attempt", step, 0, 1337, None, {}, {})


def write(root, step, model, optimizer, piece_bytes=10**9):
    to = Destination(root, piece_bytes)
    return begin_snapshot(to, state_at(step), model, optimizer, TOKENIZER.save).write()
