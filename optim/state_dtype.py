"""What an optimizer keeps, in fewer bits between two updates: bf16, or blocks of 8 bits.

An update expands it to float32, a few parameters at a time, computes as ever, and rounds at random,
up as often as the distance says (Gupta et al., "Deep Learning with Limited Numerical Precision",
2015). An average then stays right in the mean: to the nearest number, one whose decay changes it by
less than half a digit would stand still. The random numbers are a function of the update's number,
so runs resume bit by bit and replicas agree. What is kept is float32 without loss, so that is what
snapshots hold, and any of the dtypes goes on from any other.

8 bits are floating-point numbers of three digits, whose exponents count down from the largest of
their block: an average has a sign and 4 bits of exponent, an average of squares 5. Blocks lie
within a row, so that a shard of rows has whole ones.

Letters in shapes: R rows, C columns, N = C / block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from model.sharded import local_part, placed_like
from optim.eager import EagerOptimizer

FLOAT32, BF16, EIGHT_BITS = "float32", "bf16", "8bit"
STATE_DTYPES = (FLOAT32, BF16, EIGHT_BITS)
"""The values of `optim.state_dtype`."""
BYTES = {FLOAT32: 4, BF16: 2, EIGHT_BITS: 1}
"""Of a number."""
GROUP = "state_dtype"
"""The entry of a group of parameters with that value."""
STEP = "step"
"""torch's name for the number of updates, which it keeps on the CPU unless the update is fused."""
LEAST_NUMBERS = 4096
"""Smaller tensors, such as biases and norms, stay float32: they matter more than they take."""
MOST_BLOCK, LEAST_BLOCK = 256, 32
"""Numbers that share a largest exponent."""
AT_ONCE = 1 << 24
"""Numbers of a process that are expanded at once, if not those of one parameter: 64 MiB."""
PIECE = 1 << 22
"""Numbers that are converted at once, which takes some 20 bytes of each."""
LARGEST = ".largest"
"""After the name of what is kept in 8 bits: the first bits of the largest in each block, (R, N)."""
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""torch's names of averages of squares, which are never negative."""
DROPPED = {BF16: 16, EIGHT_BITS: 20}
"""How many of float32's bits are not kept: of its 23 digits, 7 or 3 are."""
SIGN_SHIFT = 24
"""From the sign of a code to that of a float32."""
Noise = torch.Generator | None
"""What draws the random numbers; None rounds to the nearest."""


class ReducedState(EagerOptimizer):
    """An optimizer whose state is kept in a dtype of `STATE_DTYPES` between its updates.

    Its update of a parameter must not depend on others in the same call, and it must count its
    updates under `STEP`.
    """

    def __init__(self, optimizer: Optimizer, dtype: str) -> None:
        self._optimizer = optimizer
        self._updates: int | None = None
        groups = [{**group, GROUP: dtype} for group in optimizer.param_groups]
        super().__init__(groups, optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. A closure is not supported."""
        assert closure is None
        inner, seeds = self._optimizer, self._seeds()
        noise = torch.Generator(self.param_groups[0]["params"][0].device)
        for group in self.param_groups:
            for parameters in _few(group["params"]):
                # accelerate replaces groups and state when it prepares the optimizer.
                inner.param_groups = [{**group, "params": parameters}]
                for one in parameters:
                    if state := self.state.get(one):
                        inner.state[one] = {key: expanded(state, key) for key in kept_keys(state)}
                inner.step()
                for one in parameters:
                    noise.manual_seed(next(seeds))
                    for key, value in inner.state.pop(one, {}).items():
                        keep(self.state[one], key, value, group[GROUP], noise)

    def _seeds(self) -> Iterator[int]:
        """The seeds of the next update, one for each parameter, the same in each process.

        So copies of a parameter agree, where processes have parts of others of different sizes.
        """
        parameters = [one for group in self.param_groups for one in group["params"]]
        if self._updates is None:  # reading it waits for the device
            self._updates = int(self.state.get(parameters[0], {}).get(STEP, 0))
        self._updates += 1
        return count(self._updates * len(parameters))


def _few(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters in turn, so many that they have `AT_ONCE` numbers, and at least one."""
    some: list[nn.Parameter] = []
    numbers = 0
    for one in parameters:
        size = local_part(one).numel()
        if some and numbers + size > AT_ONCE:
            yield some
            some, numbers = [], 0
        some.append(one)
        numbers += size
    if some:
        yield some


def keep(
    state: dict[str, Tensor], key: str, value: Tensor, dtype: str, noise: Noise = None
) -> None:
    """Keep a float32 value under a key of a parameter's state, in the dtype."""
    for name, tensor in reduced(key, value, dtype, noise).items():
        if name in state and state[name].dtype == tensor.dtype:
            local_part(state[name]).copy_(local_part(tensor))  # memory is not fragmented
        else:
            state[name] = tensor


def reduced(key: str, value: Tensor, dtype: str, noise: Noise = None) -> dict[str, Tensor]:
    """What is kept of a float32 value, by name: itself where it is small or stays float32."""
    size = None if dtype == FLOAT32 or value.dim() < 2 else block_size(value.size(-1))
    if size is None or value.numel() < LEAST_NUMBERS:
        return {key: value}
    local = local_part(value)
    pieces = local.split(_rows(local))
    if dtype == BF16:
        bits = torch.cat([first_bits(one, DROPPED[BF16], noise).short() for one in pieces])
        return {key: placed_like(value, bits.view(torch.bfloat16), tuple(value.shape))}
    found = [packed(one, size, key not in SQUARES, noise) for one in pieces]
    codes, largest = map(torch.cat, zip(*found, strict=True))
    blocks = (*value.shape[:-1], value.size(-1) // size)
    return {
        key: placed_like(value, codes, tuple(value.shape)),
        key + LARGEST: placed_like(value, largest, blocks),
    }


def kept_keys(state: dict[str, Any]) -> list[str]:
    """The names of what is kept of a parameter, whatever its dtype."""
    return [key for key in state if not key.endswith(LARGEST)]


def expanded(state: dict[str, Tensor], key: str) -> Tensor:
    """The float32 value that is kept under a key."""
    value, largest = state[key], state.get(key + LARGEST)
    if largest is None:
        return value.float()
    codes, of_blocks = local_part(value), local_part(largest)
    numbers = torch.empty(codes.shape, device=codes.device)
    parts = (one.split(_rows(codes)) for one in (numbers, codes, of_blocks))
    for piece, some, of_some in zip(*parts, strict=True):
        piece.copy_(unpacked(some, of_some, key not in SQUARES))
    return placed_like(value, numbers, tuple(value.shape))


def _rows(local: Tensor) -> int:
    """Rows of a tensor of which the integers of a conversion are in memory at once."""
    return max(1, PIECE * len(local) // max(1, local.numel()))


def block_size(columns: int) -> int | None:
    """The largest block that divides a row; None where only small ones do."""
    sizes = range(min(MOST_BLOCK, columns), LEAST_BLOCK - 1, -1)
    return next((size for size in sizes if columns % size == 0), None)


def first_bits(values: Tensor, dropped: int, noise: Noise) -> Tensor:
    """The bits of float32 values without the last ones, rounded, as int32."""
    bits = values.contiguous().view(torch.int32)
    if noise is None:
        return (bits + (1 << dropped - 1)) >> dropped
    # One word of 64 bits has the random bits of two numbers.
    words = torch.empty((bits.numel() + 1) // 2, dtype=torch.int64, device=bits.device)
    drawn = words.random_(generator=noise).view(torch.int32)[: bits.numel()].view(bits.shape)
    return drawn.bitwise_and_((1 << dropped) - 1).add_(bits).bitwise_right_shift_(dropped)


def packed(values: Tensor, size: int, signed: bool, noise: Noise) -> tuple[Tensor, Tensor]:
    """Values (..., R, C) to codes of their shape, uint8, and the largest bits (..., R, N), int16.

    A code of 0 is 0, and the others count up to the largest of their block.
    """
    codes_of_sign = 127 if signed else 255
    bits = first_bits(values.abs(), DROPPED[EIGHT_BITS], noise).unflatten(-1, (-1, size))
    largest = bits.amax(-1)
    codes = (bits - (largest[..., None] - codes_of_sign)).flatten(-2)
    # An update is divided by the root of squares: that of a number that is not 0 is not 0.
    codes = codes.clamp_(0 if signed else 1).masked_fill_(values == 0, 0)
    if signed:
        codes |= (values.contiguous().view(torch.int32) >> SIGN_SHIFT) & 128
    return codes.to(torch.uint8), largest.short()


def unpacked(codes: Tensor, largest: Tensor, signed: bool) -> Tensor:
    """The float32 values of codes (..., R, C) with the largest bits (..., R, N)."""
    size, codes_of_sign = codes.size(-1) // largest.size(-1), 127 if signed else 255
    numbers = codes.int()
    without_sign = numbers & codes_of_sign
    offsets = (largest.int() - codes_of_sign)[..., None]
    bits = (without_sign.unflatten(-1, (-1, size)) + offsets).flatten(-2).clamp_(0)
    bits = (bits << DROPPED[EIGHT_BITS]).masked_fill_(without_sign == 0, 0)
    if signed:
        bits |= (numbers & 128) << SIGN_SHIFT
    return bits.view(torch.float32)
