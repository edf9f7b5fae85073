"""The loss of models of transformers, in chunks, is that of all their logits at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import families
from model.causal_lm import CausalLM, CausalLMConfig
from model.families import build_empty, layout_without_memory
from model.head import IGNORED, Head
from model.output_layer import OutputLayer, find_steps
from planning.allocation_log import LiveBytes
from planning.estimate import MemoryEstimate
from planning.fake_trace import Shape, traced_phases

SMALL = {
    **families.ROTARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "rotary_dim": 4,
    "n_positions": 48,
    "head_dim": 8,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
CAPPED = (("div", 2.0), ("tanh", None), ("mul", 2.0))
STEPS = {
    "cohere": ({"logit_scale": 0.25, "use_qk_norm": False}, (("mul", 0.25),)),
    "gemma2": ({"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}, CAPPED),
    "glm": ({}, ()),
    "gpt_neox": ({}, ()),
    "gptj": ({}, ()),  # its output layer has a bias
    "granite": ({"logits_scaling": 4.0}, (("div", 4.0),)),
    "helium": ({}, ()),
    "mistral": ({}, ()),
    "nanochat": ({"final_logit_softcapping": 2.0}, CAPPED),
    "olmo2": ({}, ()),
    "phi": ({}, ()),  # so has this one
    "phi3": ({}, ()),
    "qwen2": ({}, ()),
    "smollm3": ({}, ()),
    "stablelm": ({}, ()),
    "starcoder2": ({}, ()),
}
"""By model_type, entries of config.json, and what the architecture does to logits."""
MODELS = {
    **{name: {"model_type": name, **SMALL, **more} for name, (more, _) in STEPS.items()},
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
    assert isinstance(model.get_output_embeddings(), OutputLayer)
    found = []
    for loss_of in (model, lambda *both: loss_of_logits(model, *both)):
        loss = loss_of(ids, targets)
        loss.backward()
        found.append((loss.detach(), [one.grad.clone() for one in model.parameters()]))
        model.zero_grad()
    (ours, gradients), (theirs, expected) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, targets), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", STEPS)
def test_what_an_architecture_does_to_logits_is_found(name):
    config = CausalLMConfig.read(dict(MODELS[name]))
    for model in (built(MODELS[name]), build_empty(config), layout_without_memory(config)._model):
        assert model.get_output_embeddings().steps == STEPS[name][1]


def test_what_cannot_be_found_out_keeps_all_logits(monkeypatch):
    monkeypatch.setattr("model.output_layer.find_steps", lambda lm: None)
    model, (ids, targets) = built(MODELS["granite"]), batch()
    assert not isinstance(model.get_output_embeddings(), OutputLayer)
    torch.testing.assert_close(model(ids, targets), loss_of_logits(model, ids, targets))


def test_an_unknown_step_is_not_left_out():
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS["granite"]))
    original = type(lm).forward

    class Strange(type(lm)):
        def forward(self, *args, **options):
            found = original(self, *args, **options)
            found.logits = found.logits.clamp(max=1.0)
            return found

    lm.__class__ = Strange
    assert find_steps(lm) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_loss_stays_close(dtype):
    model, (ids, targets) = built(MODELS["gemma2"]), batch()
    with torch.autocast("cpu", dtype):
        in_chunks, whole = model(ids, targets), loss_of_logits(model, ids, targets)
    assert in_chunks.dtype == torch.float32
    torch.testing.assert_close(in_chunks, whole, rtol=1e-2, atol=0)


def test_a_chunk_of_logits_has_its_bound(monkeypatch):
    """With less memory for a chunk there are more of them, and the loss is the same."""
    model, (ids, targets) = built(MODELS["llama of families"]), batch(8, 48)
    losses, peaks = [], []
    for most in (1 << 30, 8 * 320 * 4):
        monkeypatch.setattr("model.head.LOGIT_BYTES", most)
        with LiveBytes() as tracker:
            loss = model(ids, targets)
            loss.backward()
        losses.append(loss.item())
        peaks.append(tracker.log.totals().sum(axis=1).max())
        model.zero_grad()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("rows", [60, pytest.param(100, marks=pytest.mark.slow), 150])
def test_a_plan_knows_the_chunks(rows, monkeypatch):
    """One chunk grows with the sequences, of 48 tokens each, then a second one, and no other."""
    monkeypatch.setattr("model.head.LOGIT_BYTES", rows * 320 * 4)
    config, shape = CausalLMConfig.read(dict(MODELS["qwen2"])), Shape("cpu", "no")
    estimate = MemoryEstimate(config, shape)
    for sequences in (1, 2, 3, 4, 6, 9, 14):
        counted = traced_phases(config, sequences, shape).log.totals().sum(axis=1).max()
        assert max(estimate.peaks(sequences, True).values()) == pytest.approx(counted, rel=0.02)


def test_rows_that_align_the_product_count_nowhere(monkeypatch):
    """On CUDA in 16 bits, a product of more outputs is faster."""
    (_, targets), model = batch(), built(MODELS["gptj"])
    head = model.get_output_embeddings()
    hidden = torch.randn(3, 24, head.in_features, requires_grad=True)
    found = []
    for unaligned in (False, True):
        monkeypatch.setattr("model.head.is_unaligned", lambda *_, is_so=unaligned: is_so)
        monkeypatch.setattr("model.head.ALIGNED", 1000)
        loss = Head.forward(head, hidden, targets)
        loss.backward()
        assert head.logits(hidden).shape == (3, 24, families.VOCABULARY)
        found.append((loss.detach(), hidden.grad, head.weight.grad, head.bias.grad))
        hidden.grad = head.weight.grad = head.bias.grad = None
    for plain, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-6)
