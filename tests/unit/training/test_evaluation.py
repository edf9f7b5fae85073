"""The held-out loss: against one worked out from all logits, and what it takes of memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator

from model.gpt import GPT, GPTConfig
from model.head import IGNORED
from planning.allocation_log import LiveBytes
from training.evaluation import held_out_loss

T = 12
MANY, FEW = 31, 9
"""Vocabularies whose loss is taken in pieces of the logits, and of all at once: 16 are between."""


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def model_of(vocabulary: int) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary, T, n_layer=2, n_head=2, n_embd=16, dropout=0.3))


def held_out(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Six windows, the last two of them with nothing that counts, as batches are filled up."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(vocabulary, (2, 6, T), generator=generator)
    targets[3, 5:] = IGNORED  # the text ends within a window
    targets[4:] = IGNORED
    return inputs, targets


@pytest.mark.parametrize("vocabulary", [MANY, FEW])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 6])
def test_the_held_out_loss_weighs_each_target_alike(accelerator, vocabulary, micro_batch_size):
    """However it is split; at 1 and 2 there are micro-batches without a target."""
    model = model_of(vocabulary)
    inputs, targets = held_out(vocabulary)
    batches = zip(inputs.split(micro_batch_size), targets.split(micro_batch_size), strict=True)

    found = held_out_loss(accelerator, model, [(batch, 1.0) for batch in batches])

    assert model.training
    with torch.no_grad():
        logits = model.eval()(inputs).double()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    assert found == pytest.approx(expected.item(), rel=1e-6)


def test_a_loss_that_is_not_finite_stays_so(accelerator):
    model = model_of(MANY)
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = torch.nan

    assert not torch.tensor(held_out_loss(accelerator, model, [(held_out(MANY), 1.0)])).isfinite()


@pytest.mark.parametrize("vocabulary", [2_000, FEW])
def test_an_evaluation_takes_less_memory_than_a_step(accelerator, vocabulary, monkeypatch):
    """Of a model whose logits are most of what it takes, and of one where they are little."""
    model = model_of(vocabulary)
    batch = held_out(vocabulary)
    monkeypatch.setattr("model.head.LOGIT_BYTES", batch[0].numel() * vocabulary)  # four chunks

    def added(work) -> int:
        with LiveBytes() as tracker:
            work()
        return int(tracker.totals().sum(axis=1).max())

    step = added(lambda: model(*batch).backward())
    model.zero_grad()
    assert added(lambda: held_out_loss(accelerator, model, [(batch, 1.0)])) < 0.8 * step
