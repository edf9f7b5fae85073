"""Attention: kernels for CUDA, documents without a mask, and products of matrices on a CPU.

No test has a GPU: a loop over documents stands in for torch's variable-length kernel.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F

import model.attention
from config.compose import load_config
from config.schema import ConfigError
from model.attention import LONGEST_PRODUCTS, attend_by_products
from model.causal_lm import PACKING
from model.families import build_model
from model.gpt import Attention, GPTConfig
from model.kernels import KERNEL, VARLEN
from planning.fake_trace import Shape, traced_update
from shared_models import T, sizes
from snapshot.disk.state import RunState
from training.run.kernels import choose_attention, refuse_kernel

LENGTHS = (7, 1, 24)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)
IDS = torch.randint(50, (2, T), generator=torch.Generator().manual_seed(1))


def by_document(query, key, value, ends, other_ends, longest, other, **options):
    """What torch's varlen_attn computes: queries (B * T, H, D) to the same shape."""
    assert ends is other_ends
    assert ends.dtype == torch.int32
    mixed = []
    for begin, end in pairwise(ends.tolist()):
        assert 0 < end - begin <= longest
        one = (part[begin:end].transpose(0, 1)[None] for part in (query, key, value))
        places = torch.arange(end - begin)
        distance = places[:, None] - places
        window, right = options["window_size"]
        assert right == 0
        mask = (distance >= 0) & ((distance <= window) | (window < 0))
        found = F.scaled_dot_product_attention(
            *one, attn_mask=mask, scale=options["scale"], enable_gqa=options["enable_gqa"]
        )
        mixed.append(found[0].transpose(0, 1))
    return torch.cat(mixed)


def loss_and_gradients(model):
    loss = model(IDS, IDS.roll(-1, 1), POSITIONS)
    model.zero_grad()
    loss.backward()
    return loss, torch.cat([one.grad.flatten() for one in model.parameters()])


@pytest.mark.parametrize("name", ["gpt2", *(f"their {family}" for family in PACKING)])
def test_documents_without_a_mask_have_the_same_loss_and_gradients(monkeypatch, name):
    calls = []
    monkeypatch.setattr(model.attention, "SIXTEEN_BITS", (torch.float32,))
    monkeypatch.setattr(
        torch.nn.attention.varlen,
        "varlen_attn",
        lambda *inputs, **options: calls.append(inputs) or by_document(*inputs, **options),
    )
    torch.manual_seed(0)
    built = build_model(sizes(name))
    expected = loss_and_gradients(built)
    assert not calls
    built.use_varlen()
    found = loss_and_gradients(built)
    assert len(calls) == (2 if built.varlen else 0)
    assert built.varlen or name == "their gemma2"  # transformers has no fused kernel for it
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    with torch.no_grad():  # no documents: as before
        copy = build_model(sizes(name))
        copy.load_state_dict(built.state_dict())
        torch.testing.assert_close(built(IDS), copy(IDS))


@pytest.mark.parametrize("name", ["gpt2", pytest.param("their qwen3", marks=pytest.mark.slow)])
def test_a_plan_has_no_mask_where_the_kernel_needs_none(name):
    time = 256
    config = replace(sizes(name), block_size=time)
    peaks = []
    for packed, kernel in ((False, None), (True, None), (True, KERNEL)):
        shape = Shape("cuda", "bf16", packed=packed, attention=kernel)
        peaks.append(traced_update(config, 2, shape).totals().sum(1).max())
    without, varlen, masked = peaks
    bytes_of_mask = 2 * time * time * 2
    assert varlen < masked
    assert masked - without > 0.9 * bytes_of_mask > varlen - without


A100, TURING = (8, 0), (7, 5)


@pytest.mark.parametrize(
    ("name", "precision", "dropout", "capability", "head_size", "can"),
    [
        (VARLEN, "bf16", 0.0, A100, 64, True),
        (VARLEN, "bf16", 0.0, A100, None, True),
        (VARLEN, "no", 0.0, A100, 64, False),
        (VARLEN, "bf16", 0.1, A100, 64, False),
        (VARLEN, "bf16", 0.0, TURING, 64, False),
        (VARLEN, "bf16", 0.0, A100, 12, False),
        (VARLEN, "bf16", 0.0, A100, 264, False),
        (KERNEL, "no", 0.1, TURING, 12, True),
    ],
)
def test_a_kernel_that_cannot_work_is_refused(
    monkeypatch, name, precision, dropout, capability, head_size, can
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = load_config([f"run.attention={name}", f"model.dropout={dropout}"])
    gpu = SimpleNamespace(device=torch.device("cuda"), mixed_precision=precision)
    if can:
        refuse_kernel(gpu, config, name, head_size)
        return
    words = rf"run.attention=varlen needs .* mixed_precision: {precision}, model.dropout={dropout} "
    with pytest.raises(ConfigError, match=words):
        refuse_kernel(gpu, config, name, head_size)
    with pytest.raises(ConfigError, match="varlen, with which the run began, needs"):
        refuse_kernel(gpu, load_config([f"model.dropout={dropout}"]), name, head_size)


def test_a_kernel_of_another_device_is_refused():
    cpu = SimpleNamespace(device=torch.device("cpu"), mixed_precision="bf16")
    with pytest.raises(ConfigError, match="varlen runs on CUDA devices, and this run computes on"):
        refuse_kernel(cpu, load_config(["run.attention=varlen"]), VARLEN)


@pytest.mark.parametrize(
    ("attention_key", "documents", "before", "expected"),
    [
        ("auto", "masked", None, VARLEN),
        ("auto", "packed", None, None),
        ("kernel", "masked", None, "kernel"),
        ("auto", "masked", "kernel", "kernel"),
    ],
)
def test_a_run_on_cuda_keeps_what_it_began_with(
    monkeypatch, attention_key, documents, before, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: A100)
    monkeypatch.setattr("training.run.kernels.decided_by_main", lambda _, decide: decide())
    monkeypatch.setattr("training.run.kernels.run_on_all", lambda _, check: check())
    gpu = SimpleNamespace(
        device=torch.device("cuda"), mixed_precision="bf16", parallelism_config=None
    )
    config = load_config([f"run.attention={attention_key}", f"data.documents={documents}"])
    for step in (0, 5):
        state = RunState("a" * 32, "b" * 32, step, 0, 1, None, {}, {}, attention=before)
        built = build_model(sizes("gpt2"))
        choose_attention(gpu, config, built, state)
        is_older = before is None and step > 0 and attention_key == "auto"
        assert state.attention == (None if is_older else expected)
        assert built.varlen == (state.attention == VARLEN)


@pytest.fixture
def by_products(monkeypatch):
    """The queries of all attention that is computed by products."""
    taken = []

    def noted(query, *rest):
        taken.append(query)
        return attend_by_products(query, *rest)

    monkeypatch.setattr(model.attention, "attend_by_products", noted)
    return taken


@pytest.mark.parametrize(("dtype", "nearly"), [(torch.float32, 1e-6), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("time", [2, 300, LONGEST_PRODUCTS])
def test_attention_by_products_is_torchs_own(dtype, nearly, time):
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(2, 3, time, 8, generator=generator).requires_grad_() for _ in range(3)]
    upstream = torch.randn(2, 3, time, 8, generator=generator)
    ours = attend_by_products(*(part.to(dtype) for part in parts)).float()
    theirs = F.scaled_dot_product_attention(*(part.double() for part in parts), is_causal=True)
    results = [(one, *torch.autograd.grad(one, parts, upstream)) for one in (ours, theirs.float())]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=nearly, atol=nearly)


def test_dropout_drops_and_scales_the_weights():
    """Values that are units show the weights themselves."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 3, 16, 16)
    value = torch.eye(16).expand(4, 3, 16, 16)
    exact = attend_by_products(query, key, value)
    dropped = attend_by_products(query, key, value, 0.25)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], exact[kept] / 0.75)
    assert kept[exact > 0].float().mean() == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize(
    ("time", "device", "expected"),
    [
        (LONGEST_PRODUCTS, "cpu", True),
        (LONGEST_PRODUCTS + 1, "cpu", False),
        (1, "cpu", False),  # one position sees all
        (8, "meta", False),
    ],
)
def test_attention_is_by_products_where_they_are_faster(by_products, time, device, expected):
    attention = Attention(GPTConfig(31, time, 1, 2, 16), 0).to(device)
    attention(torch.zeros(1, time, 16, device=device))
    assert bool(by_products) == expected
