"""What an optimizer keeps in fewer bits: right in the mean, and not rounded again by a snapshot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optim.optimizers import UsualSettings, build, is_reducible
from optim.sharing import Work
from optim.state_dtype import (
    BF16,
    EIGHT_BITS,
    FLOAT32,
    LARGEST,
    block_size,
    expanded,
    kept_keys,
    reduced,
)

WORK = Work(torch.device("cpu"), torch.float32)
REDUCED = (BF16, EIGHT_BITS)
EACH = pytest.mark.parametrize("dtype", REDUCED)
KEYS = pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])


def noise(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(key: str, *shape: int) -> torch.Tensor:
    """Of very different sizes, within a row and between rows; some are 0, and so is a row."""
    drawn = torch.randn(shape, generator=noise(1))
    spread = torch.randn(shape, generator=noise(2))
    values = drawn * 10 ** (spread + torch.linspace(-12, 2, shape[0])[:, None])
    values[1], values[2, ::3] = 0, 0
    return values.square() if key == "exp_avg_sq" else values


@KEYS
@EACH
@pytest.mark.parametrize("columns", [256, 768, 96, 1000])
@pytest.mark.parametrize("drawn", [True, False])
def test_what_was_rounded_is_not_rounded_again(key, dtype, columns, drawn):
    state = reduced(key, numbers(key, 64, columns), dtype, noise() if drawn else None)
    assert kept_keys(state) == [key]
    again = reduced(key, expanded(state, key), dtype)
    assert expanded(state, key).dtype == torch.float32
    assert again.keys() == state.keys()
    for name, tensor in again.items():
        assert tensor.equal(state[name]), name


@KEYS
@pytest.mark.parametrize(("dtype", "step"), [(BF16, 2**-7), (EIGHT_BITS, 2**-3)])
def test_a_number_is_rounded_to_a_neighbour(key, dtype, step):
    values = numbers(key, 64, 256)
    # Relative to the largest of its row, a number with a sign has 16 powers of two.
    is_large = values.abs() > 2**-14 * values.abs().amax(1, keepdim=True)
    for generator, most in ((noise(), step), (None, step / 2)):
        found = expanded(reduced(key, values, dtype, generator), key)
        error = (found - values).abs() / values.abs()
        assert 0 < error[is_large].max() <= most
        assert (found[values == 0] == 0).all()
        assert (found.sign() == values.sign())[is_large].all()


@KEYS
@EACH
def test_rounding_is_right_in_the_mean(key, dtype):
    values = numbers(key, 32, 256)
    generator, times = noise(), 400
    total = sum(expanded(reduced(key, values, dtype, generator), key) for _ in range(times))
    is_large = values.abs() > 2**-12 * values.abs().amax(1, keepdim=True)
    error = ((total / times - values) / values)[is_large]
    assert error.mean().abs() < 1e-3
    assert error.abs().max() < 0.04  # a digit of 1/8, over the root of the number of times


@EACH
def test_an_average_decays_although_a_step_changes_less_than_a_digit(dtype):
    key, decay, steps = "exp_avg_sq", 0.999, 1000
    values, generator = torch.rand(64, 256, generator=noise()) + 1, noise()
    state = reduced(key, values, dtype)
    for _ in range(steps):
        state = reduced(key, decay * expanded(state, key), dtype, generator)
    found = (expanded(state, key) / values).mean() / decay**steps
    assert found == pytest.approx(1, abs=0.02)
    still = reduced(key, values, dtype)
    for _ in range(steps):
        still = reduced(key, decay * expanded(still, key), dtype)
    assert (expanded(still, key) / values).mean() > 0.9  # to the nearest: it stands still


def test_the_root_of_a_square_that_is_not_0_is_not_0():
    squares = torch.full((64, 256), 1e-12)
    squares[:, 0], squares[:, 1] = 1.0, 0.0
    found = expanded(reduced("exp_avg_sq", squares, EIGHT_BITS, noise()), "exp_avg_sq")
    assert (found[:, 2:] > 0).all()
    assert (found[:, 1] == 0).all()


def test_small_and_oddly_shaped_tensors_stay_float32():
    for shape in ((8192,), (), (8, 256), (300, 17)):
        value = torch.randn(shape)
        assert reduced("exp_avg", value, EIGHT_BITS)["exp_avg"] is value
    assert [block_size(columns) for columns in (256, 768, 1000, 96, 50257)] == [
        *(256, 256, 250, 96),
        None,
    ]


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(*shape)) for shape in ((64, 128), (128, 64), (64,))]


def updated(dtype: str, steps: int) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Parameters after updates whose gradients are the same for any dtype."""
    some = parameters()
    settings = UsualSettings(state_dtype=dtype)
    optimizer = build("adamw", dict.fromkeys(some, 0), settings, WORK)
    generator = noise(3)
    for _ in range(steps):
        for one in some:
            one.grad = torch.randn(one.shape, generator=generator)
        optimizer.step()
    return some, optimizer


@EACH
def test_an_update_is_that_of_the_expanded_state(dtype):
    some, optimizer = updated(dtype, 3)
    plain = build("adamw", dict.fromkeys(copies := parameters(), 0), UsualSettings(), WORK)
    for one, copy in zip(some, copies, strict=True):
        copy.data.copy_(one.data)
        copy.grad = one.grad = torch.randn(one.shape)
        state = optimizer.state[one]
        plain.state[copy] = {key: expanded(state, key).clone() for key in kept_keys(state)}
    optimizer.step()
    plain.step()
    for i, (one, copy) in enumerate(zip(some, copies, strict=True)):
        generator = noise(4 * 3 + i)  # of the fourth update, and three parameters
        assert one.equal(copy)
        for key, value in plain.state[copy].items():
            for name, tensor in reduced(key, value, dtype, generator).items():
                assert tensor.equal(optimizer.state[one][name])


def test_a_number_takes_the_bytes_that_its_dtype_says():
    for dtype, per_number in ((FLOAT32, 8), (BF16, 4), (EIGHT_BITS, 2 * (1 + 2 / 64))):
        some, optimizer = updated(dtype, 1)
        state = optimizer.state[some[1]]  # 64 columns: one block a row
        assert sum(one.nbytes for one in state.values()) == 4 + per_number * some[1].numel()
        assert any(LARGEST in key for key in state) == (dtype == EIGHT_BITS)


@pytest.mark.parametrize(("dtype", "most"), [(BF16, 5e-3), (EIGHT_BITS, 0.1)])
def test_many_updates_stay_near_those_of_float32(dtype, most):
    exact, near = updated(FLOAT32, 50)[0], updated(dtype, 50)[0]
    for one, other, begin in zip(exact, near, parameters(), strict=True):
        distance = (one - other).norm() / (one - begin).norm()
        assert distance < most
        assert (distance > 0) == (one.dim() > 1)


def test_it_is_for_optimizers_that_count_updates_and_update_each_parameter_alone(monkeypatch):
    assert is_reducible("adamw")
    assert not is_reducible("muon")
    monkeypatch.setitem(
        __import__("optim.optimizers").optimizers.OPTIMIZERS,
        "momentum",
        lambda parts, *_: torch.optim.SGD([*parts], lr=1e-3, momentum=0.9),
    )
    assert not is_reducible("momentum")
