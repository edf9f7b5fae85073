"""A residual stream in bf16: norms in float32, less memory, and nearly the same step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from config.schema import ConfigError
from families import FAMILIES
from model.causal_lm import CausalLMConfig
from model.gpt import GPTConfig
from model.llama import LlamaConfig
from model.residual import layer_norm, rms_norm
from tracing.products import products_of_step
from training.distributed.accelerator import choose_residual_dtype, refuse_bf16_residual

C = 96
IDS = torch.arange(512).view(8, 64) * 7 % 256
NORMS = {
    "LayerNorm": (layer_norm, F.layer_norm, 2, 1e-2),
    "RMSNorm": (rms_norm, F.rms_norm, 1, 1e-3),
}


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).detach().norm() / other.detach().float().norm())


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_16_bits_is_computed_in_float32(name):
    """Its weights have the gradients of float32, which 16 bits miss, in LayerNorm by percents."""
    ours, theirs, count, error = NORMS[name]
    torch.manual_seed(0)
    x, grad = torch.randn(64, 32, C).bfloat16(), torch.randn(64, 32, C).bfloat16()
    weights = [1 + 0.1 * torch.randn(C), 0.1 * torch.randn(C)][:count]

    def results(norm, x, *weights):
        inputs = [one.clone().requires_grad_() for one in (x, *weights)]
        kept = []
        with saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
            normed = norm(*inputs)
        normed.backward(grad.to(normed.dtype))
        large = {one.dtype for one in kept if one.numel() == x.numel()}
        return [normed, *(one.grad for one in inputs)], large

    exact, _ = results(lambda x, *weights: theirs(x, (C,), *weights, eps=1e-5), x.float(), *weights)
    found, kept = results(lambda x, *weights: ours(x, *weights, 1e-5), x, *weights)
    assert kept == {torch.bfloat16}
    assert [one.dtype for one in found] == [torch.bfloat16] * 2 + [torch.float32] * count
    narrow, _ = results(
        lambda x, *weights: theirs(x, (C,), *(one.bfloat16() for one in weights), eps=1e-5),
        *(x, *weights),
    )
    assert min(map(relative, narrow[2:], exact[2:])) > error
    for one, other, most in zip(found, exact, (2e-3, 2e-3, 1e-6, 1e-6), strict=False):
        assert relative(one, other) < most


def stepped(config, in_bf16: bool, autocast: bool = True):
    """Loss, norm of the gradient, dtypes of blocks' inputs, and bytes kept for backward."""
    torch.manual_seed(0)
    model = config.build().train()
    choose_residual_dtype(model, "bf16" if in_bf16 else "float32")
    dtypes, kept = set(), {}
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: dtypes.add(inputs[0].dtype))

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    precision = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with saved_tensors_hooks(keep, lambda one: one), precision:
        loss = model(IDS, IDS.roll(-1, 1))
    loss.backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])
    return loss.item(), norm.item(), dtypes, sum(kept.values())


@pytest.mark.parametrize("way", [False, True, "selective"])
@pytest.mark.parametrize("family", [GPTConfig, LlamaConfig])
def test_a_step_is_nearly_that_of_a_float32_stream(family, way):
    config = family(256, 64, 4, 4, 64, activation_checkpointing=way)
    loss, norm, dtypes, kept = stepped(config, in_bf16=True)
    wide_loss, wide_norm, wide_dtypes, wide_kept = stepped(config, in_bf16=False)
    assert (dtypes, wide_dtypes) == ({torch.bfloat16}, {torch.float32})
    assert loss == pytest.approx(wide_loss, rel=1e-3)
    assert loss != wide_loss
    assert norm == pytest.approx(wide_norm, rel=2e-2)
    numbers = IDS.numel() * config.n_embd * config.n_layer
    assert wide_kept - kept >= 2 * numbers  # each block's input, at least


@pytest.mark.parametrize("family", [GPTConfig, LlamaConfig])
def test_without_autocast_the_stream_is_float32(family):
    """As where a model of a run is used by itself."""
    config = family(256, 64, 2, 4, 64)
    assert stepped(config, True, autocast=False)[:3] == stepped(config, False, autocast=False)[:3]


@pytest.mark.parametrize("family", [GPTConfig, LlamaConfig])
def test_products_stay_in_bf16(family):
    model = family(320, 64, 2, 4, 64).build().train()
    model.use_bf16_residual()
    assert {dtype for _, dtype in products_of_step(model, IDS).counts} == {"bfloat16"}


@pytest.mark.parametrize(("precision", "named"), [("no", "float32"), ("fp16", "fp16")])
def test_other_precisions_are_refused(precision, named):
    sentence = f"needs mixed_precision: bf16 or fp8, and this run computes in {named}. Set it"
    with pytest.raises(ConfigError, match=sentence):
        refuse_bf16_residual(precision)
    for one in ("bf16", "fp8"):
        refuse_bf16_residual(one)


def test_a_model_of_transformers_is_refused():
    model = CausalLMConfig.read(FAMILIES["qwen3"]).build()
    choose_residual_dtype(model, "float32")
    with pytest.raises(ConfigError, match=r"is for models of our own .*: the norms of qwen3 keep"):
        choose_residual_dtype(model, "bf16")
