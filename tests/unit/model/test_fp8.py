"""Which layers of a model multiply in fp8, and that everything else of them stays."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils.ao import convert_model_to_fp8_ao
from torch import nn

from families import FAMILIES
from model.causal_lm import CausalLMConfig
from model.fp8 import Fp8Error, use_fp8
from model.gpt import GPTConfig
from model.lora import hidden
from product_dtypes import products_of_step

IDS = torch.arange(62).view(2, 31)  # an odd number of tokens
SIZES = {"vocab_size": 320, "block_size": 48, "n_layer": 2, "n_head": 4, "n_embd": 64}
CONFIGS = {
    "our GPT": GPTConfig(**SIZES),
    "llama": CausalLMConfig.read(FAMILIES["llama"]),
    "mixtral": CausalLMConfig.read(FAMILIES["mixtral"]),
}
FP8_NAMES = {"float8_e4m3fn", "float8_e4m3fn x float8_e5m2"}


def names_in_fp8(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_modules() if type(one).__name__ == "Float8Linear"]


def step(model: nn.Module, ids: torch.Tensor = IDS) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss and the gradients of a step under autocast."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, ids)
    loss.backward()
    return loss.detach(), [one.grad for one in model.parameters()]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layers_in_fp8_are_those_of_accelerate(name):
    ours, theirs = CONFIGS[name].build(), CONFIGS[name].build()
    use_fp8(ours, emulated=True)
    convert_model_to_fp8_ao(theirs)
    assert names_in_fp8(ours) == names_in_fp8(theirs)


def test_every_product_of_these_layers_is_in_fp8_and_nearly_that_of_bf16():
    torch.manual_seed(0)
    model = CONFIGS["our GPT"].build().train()
    parameters = dict(model.named_parameters())
    loss, gradients = step(model)
    use_fp8(model, emulated=True)

    assert [*model.named_parameters()] == [*parameters.items()]  # the same objects
    counted = products_of_step(model, IDS).by_dtype()
    assert sum(counted.pop(name, 0) for name in FP8_NAMES) == 3 * len(names_in_fp8(model))
    assert set(counted) == {"bfloat16"}
    in_fp8, others = step(model)
    assert in_fp8 != loss
    assert in_fp8.item() == pytest.approx(loss.item(), rel=2e-3)
    for one, other in zip(gradients, others, strict=True):
        assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), 0) > 0.97


def test_other_layers_stay_in_16_bits():
    model = GPTConfig(**{**SIZES, "n_layer": 3, "n_embd": 40}).build()  # 120 and 40: uneven
    model.blocks[2].mlp.c_fc = nn.Linear(64, 64)
    model.blocks[2].mlp.c_proj = nn.Linear(64, 64)
    model.blocks[2].mlp.c_proj.requires_grad_(False)
    use_fp8(model, emulated=True)
    assert names_in_fp8(model) == ["transformer.h.2.mlp.c_fc"]


def test_a_model_without_such_a_layer_is_refused():
    model = CausalLMConfig.read(FAMILIES["gpt2"]).build()  # its layers are transformers' Conv1D
    with pytest.raises(Fp8Error, match=r"None is left\. Set mixed_precision: bf16"):
        use_fp8(model, emulated=True)
    model = CONFIGS["our GPT"].build()
    model.blocks.requires_grad_(False)
    with pytest.raises(Fp8Error, match=r"frozen ones .* None is left\."):
        use_fp8(model, emulated=True)
    with hidden("torchao"), pytest.raises(Fp8Error, match="needs torchao"):
        use_fp8(CONFIGS["our GPT"].build(), emulated=True)
