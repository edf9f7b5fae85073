"""Linear layers on a processor with AMX: those of torch, with a faster backward pass."""

import pytest
import torch
import torch.nn.functional as F

import model.cpu.layers
from model.cpu.layers import LEAST_FEATURES, FrozenAmxLinear, linear, tune
from model.family import Part
from model.frozen import FrozenLinear
from model.gpt import GPT, GPTConfig

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN needs AVX-512 for bf16"
)
SHAPE = {"vocab_size": 64, "block_size": 16, "n_layer": 2, "n_head": 6, "n_embd": LEAST_FEATURES}


def numbers(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def calls(monkeypatch):
    """A list of the inputs of all calls of `linear`, as on a processor with AMX."""
    made = []

    def noted(x, *rest):
        made.append(x.shape)
        return linear(x, *rest)

    monkeypatch.setattr(model.cpu.layers, "linear", noted)
    monkeypatch.setattr(model.cpu.layers, "has_amx", lambda: True)
    return made


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 72), (72, 24), (40, 40)])
def test_the_layer_and_its_gradients_are_torchs(inputs, outputs):
    x = numbers(3, 50, inputs, seed=1)
    weight, bias = numbers(outputs, inputs, seed=2), numbers(outputs, seed=3)
    upstream = numbers(3, 50, outputs, seed=4).bfloat16()
    results = []
    for compute, kind in ((linear, torch.float32), (F.linear, torch.float64)):
        # The reference is in 64 bits, of the same numbers rounded to 16.
        parts = [part.bfloat16().to(kind).requires_grad_() for part in (x, weight, bias)]
        with torch.autocast("cpu", torch.bfloat16, enabled=compute is linear):
            output = compute(*parts)
        results.append((output, *torch.autograd.grad(output, parts, upstream.to(output.dtype))))

    assert results[0][0].dtype == torch.bfloat16
    for ours, reference in zip(*results, strict=True):
        assert ours.is_contiguous()
        assert (ours - reference).norm() < 0.004 * reference.norm()


def test_a_frozen_parameter_has_no_gradient():
    x = numbers(5, 8, seed=1).requires_grad_()
    weight, bias = numbers(6, 8, seed=2), numbers(6, seed=3).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        linear(x, weight, bias).sum().backward()

    assert weight.grad is None
    assert bias.grad.tolist() == [5.0] * 6
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_trains_as_without_it(calls, monkeypatch, checkpointing):
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(5))
    found = []
    for amx in (True, False):
        monkeypatch.setattr(model.cpu.layers, "has_amx", lambda amx=amx: amx)
        torch.manual_seed(6)
        network = GPT(GPTConfig(**SHAPE, activation_checkpointing=checkpointing))
        tune(network)
        with torch.autocast("cpu", torch.bfloat16):
            loss = network(ids, ids)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in network.parameters())])

    assert len(calls) == 4 * SHAPE["n_layer"] * (2 if checkpointing else 1)
    for ours, torchs in zip(*found, strict=True):
        assert (ours - torchs).norm() <= 0.02 * torchs.norm()


def test_it_is_for_training_of_large_layers_in_bf16_alone(calls):
    network, x = Part(), numbers(2, LEAST_FEATURES, seed=1)
    network.small = torch.nn.Linear(LEAST_FEATURES - 1, LEAST_FEATURES)
    network.large = torch.nn.Linear(LEAST_FEATURES, LEAST_FEATURES)
    tune(network)
    layer = network.large
    layer(x)
    with torch.autocast("cpu", torch.float16):
        layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        network.small(x[:, 1:])
        with torch.no_grad():
            layer(x)
        assert not calls
        layer(x)
    assert len(calls) == 1


def test_frozen_weights_are_multiplied_so_too():
    layer = FrozenLinear(4, 8)
    layer.weight = torch.nn.Parameter(layer.weight.detach().bfloat16(), requires_grad=False)
    layer.__class__ = FrozenAmxLinear
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
