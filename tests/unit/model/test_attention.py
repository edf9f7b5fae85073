"""Kernels of attention for CUDA: what is refused, and that documents without a mask are the same.

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
from model.causal_lm import PACKING
from model.families import build_model
from model.kernels import FLASH3, FLASH4, KERNELS, VARLEN
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
        torch.testing.assert_close(built(IDS), build_and_copy(name, built)(IDS))


def build_and_copy(name, other):
    copy = build_model(sizes(name))
    copy.load_state_dict(other.state_dict())
    return copy


@pytest.mark.parametrize("name", ["gpt2", pytest.param("their qwen3", marks=pytest.mark.slow)])
def test_a_plan_has_no_mask_where_the_kernel_needs_none(name):
    time = 256
    config = replace(sizes(name), block_size=time)
    peaks = {
        (packed, kernel): traced_update(
            config, 2, Shape("cuda", "bf16", packed=packed, attention=kernel)
        )
        .totals()
        .sum(1)
        .max()
        for packed, kernel in ((False, None), (True, None), (True, "kernel"))
    }
    without, varlen, masked = peaks.values()
    bytes_of_mask = 2 * time * time * 2
    assert varlen < masked
    assert masked - without > 0.9 * bytes_of_mask > varlen - without


A100, H100 = (8, 0), (9, 0)
REFUSED = [
    (VARLEN, "no", 0.0, A100, "computes in 16 bits, and the run in float32"),
    (VARLEN, "bf16", 0.1, A100, "has no dropout, and model.dropout=0.1"),
    (VARLEN, "bf16", 0.0, (7, 5), "needs compute capability 8.x"),
    (FLASH3, "bf16", 0.0, A100, "needs compute capability 9.x"),
    (FLASH3, "bf16", 0.0, H100, None),
    (FLASH4, "bf16", 0.0, (12, 0), "needs compute capability 9.x or 10.x"),
    ("kernel", "no", 0.1, (7, 5), None),
]


@pytest.mark.parametrize(("name", "precision", "dropout", "capability", "reason"), REFUSED)
def test_a_kernel_that_cannot_work_is_refused(
    monkeypatch, name, precision, dropout, capability, reason
):
    monkeypatch.setattr("model.kernels.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    config = load_config([f"run.attention={name}", f"model.dropout={dropout}"])
    gpu = SimpleNamespace(device=torch.device("cuda"), mixed_precision=precision)
    if reason is None:
        refuse_kernel(gpu, config, name)
    else:
        with pytest.raises(ConfigError, match=f"run.attention={name} {reason}"):
            refuse_kernel(gpu, config, name)


def test_a_kernel_that_is_not_here_is_refused():
    cpu = SimpleNamespace(device=torch.device("cpu"), mixed_precision="bf16")
    gpu = SimpleNamespace(device=torch.device("cuda"), mixed_precision="bf16")
    with pytest.raises(ConfigError, match="flash3 runs on CUDA devices, and this run computes on"):
        refuse_kernel(cpu, load_config(["run.attention=flash3"]), FLASH3)
    with pytest.raises(ConfigError, match="needs the package flash_attn_interface, which is not"):
        refuse_kernel(gpu, load_config(["run.attention=flash3"]), FLASH3)
    with pytest.raises(ConfigError, match="flash3, with which the run began, needs the package"):
        refuse_kernel(gpu, load_config([]), FLASH3)
    assert "heads of 8 to 128 channels" in str(KERNELS[FLASH4].why_not("bf16", 0.0, 256))
    assert KERNELS[VARLEN].why_not("bf16", 0.0, 256) is None


def test_flash_attention_is_activated_by_its_name_in_torch(monkeypatch):
    named = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", named.append)
    for name in (VARLEN, FLASH3, FLASH4):
        KERNELS[name].activate()
    assert named == ["FA3", "FA4"]


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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: H100)
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
