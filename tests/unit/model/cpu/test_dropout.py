"""Dropout on a CPU: that of torch, with masks drawn faster."""

import pytest
import torch
import torch.nn.functional as F

from model.cpu.layers import FastDropout, dropout


@pytest.mark.parametrize("probability", [0.1, 0.2, 0.5, 0.9])
def test_as_many_elements_are_dropped_as_the_probability_says(probability):
    torch.manual_seed(1)
    count = 1_000_001  # no multiple of the four numbers of a word
    dropped = (dropout(torch.ones(count), probability) == 0).double()

    error = (probability * (1 - probability) / count) ** 0.5
    assert dropped.mean().item() == pytest.approx(probability, abs=4 * error)
    for apart in (1, 2, 3, 4, 5):  # neighbours, in a word and in the next, are independent
        both = (dropped[apart:] * dropped[:-apart]).mean().item()
        assert both == pytest.approx(probability**2, abs=4 * error)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_is_scaled_as_torch_scales_it(kind):
    x = torch.randn(7, 5, 3).to(kind)
    mine, torchs = dropout(x, 0.25), F.dropout(x, 0.25)

    assert (mine.dtype, mine.shape) == (kind, x.shape)
    both = (mine != 0) & (torchs != 0)
    assert both.sum() > 30
    assert torch.equal(mine[both], torchs[both])


def test_the_gradient_passes_where_the_element_did():
    x = torch.randn(64, 64, requires_grad=True)
    y = dropout(x, 0.3)
    y.backward(torch.ones_like(y))

    assert torch.equal(x.grad == 0, y == 0)
    assert x.grad.unique().numel() == 2


def test_the_mask_depends_on_the_generator_alone():
    x, threads = torch.ones(300, 301), torch.get_num_threads()
    masks = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch.manual_seed(5)
            masks += [dropout(x, 0.5), dropout(x.T, 0.5)]
    finally:
        torch.set_num_threads(threads)

    assert torch.equal(masks[0], masks[2])
    assert torch.equal(masks[1], masks[3])
    assert not torch.equal(masks[0], masks[1].T)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_nothing_and_everything_can_be_dropped(probability):
    x = torch.randn(1000)

    assert torch.equal(dropout(x, probability), x * (1 - probability))


def test_the_module_drops_in_training_only():
    module, x = FastDropout(0.5), torch.ones(100)

    assert not torch.equal(module(x), x)
    assert torch.equal(module.eval()(x), x)
