"""The loss of models of transformers, in chunks, is that of all their logits at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import families
from model.causal_lm import PLAIN_LOGITS, CausalLM, CausalLMConfig
from model.head import IGNORED, Head

SMALL = {
    **families.ROTARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 48,
    "head_dim": 8,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
CHANGED = {
    "cohere": {"logit_scale": 0.25, "use_qk_norm": False},
    "gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 4.0},
}
"""By model_type, entries of config.json by which the architecture changes its logits."""
MODELS = {
    **{
        name: {**SMALL, **families.FAMILIES.get(name, {}), "model_type": name}
        for name in PLAIN_LOGITS
    },
    **{f"{name} of families": content for name, content in families.FAMILIES.items()},
}


def built(content) -> CausalLM:
    torch.manual_seed(1)
    model = CausalLM(CausalLMConfig.read(dict(content)))
    with torch.no_grad():  # large enough that a cap shows
        model.get_output_embeddings().weight.normal_(std=0.3)
    return model


def batch(rows: int = 3, length: int = 24):
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(families.VOCABULARY, (rows, length), generator=draw)
    targets = torch.randint(families.VOCABULARY, (rows, length), generator=draw)
    targets[0, 3:9] = IGNORED
    return ids, targets


def loss_of_logits(model: CausalLM, ids, targets):
    logits = model.lm(input_ids=ids).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_all_logits(name):
    model, (ids, targets) = built(MODELS[name]), batch()
    assert isinstance(model.get_output_embeddings(), Head)
    found = []
    for loss_of in (model, lambda *both: loss_of_logits(model, *both)):
        loss = loss_of(ids, targets)
        loss.backward()
        found.append((loss.detach(), [one.grad.clone() for one in model.parameters()]))
        model.zero_grad()
    (ours, gradients), (theirs, expected) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    for one, other in zip(gradients, expected, strict=True):
        largest = max(1.0, other.abs().max().item())  # what its sums are rounded by
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * largest)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, targets), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [*CHANGED, "nanochat", "phi"])
def test_an_architecture_that_changes_its_logits_keeps_all_of_them(name):
    """phi has a bias in its output layer."""
    model, (ids, targets) = built({"model_type": name, **SMALL, **CHANGED.get(name, {})}), batch()
    assert not isinstance(model.get_output_embeddings(), Head)
    torch.testing.assert_close(model(ids, targets), loss_of_logits(model, ids, targets))


def test_rows_that_align_the_product_count_nowhere(monkeypatch):
    """On CUDA in 16 bits, a product of more outputs is faster."""
    (_, targets), model = batch(), built(MODELS["qwen3"])
    head = model.get_output_embeddings()
    hidden = torch.randn(3, 24, head.in_features, requires_grad=True)
    found = []
    for rows in (0, 1000):
        padded = lambda _, weight, rows=rows: F.pad(weight, (0, 0, 0, rows))  # noqa: E731
        monkeypatch.setattr("model.head.aligned", padded)
        loss = Head.forward(head, hidden, targets)
        loss.backward()
        assert head.logits(hidden).shape == (3, 24, families.VOCABULARY)
        found.append((loss.detach(), hidden.grad, head.weight.grad))
        hidden.grad = head.weight.grad = None
    for plain, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-6)
