"""Tensor parallelism: several processes share each matrix of a model.

A process has some heads of attention, some channels of the MLP and some rows of the vocabulary. A
layer's first matrices are cut by their outputs, its last one by its inputs; what that returns is a
part of a sum. So the processes meet twice at each layer: before it, and to add up what it returns.
Where a model can do so, each has some of the positions in between (Korthikanti et al., 2022).

Letters in shapes: B rows, T positions, N processes, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.head import IGNORED, Head
from model.lora import Adapter, adapter_of, without_adapter
from model.products import compute_dtype, product
from model.sharded import Cut, local_part
from model.vocabulary import Vocabulary, summed

Plan = Mapping[str, str]
"""By the pattern of a module's name, one of `WAYS`, or several with spaces between them."""


class TensorGroup:
    """The processes that share matrices, and how they meet in a forward and backward pass."""

    by_positions = False
    """Whether each has some of the positions between layers, (B, T / N, C), and not all of them."""

    def __init__(self, group: Any) -> None:
        """`group` is a process group of torch.distributed."""
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.cuts: dict[nn.Parameter, Cut] = {}

    def cut(self, model: Any, plan: Plan, by_positions: bool) -> None:
        """Keep this process's parts of the parameters, which have no values yet.

        With `by_positions`, T of a forward pass with targets must be a multiple of N.
        """
        for name, module in model.named_modules():
            joined = model.joined.get(name.rpartition(".")[2], 1)
            for pattern, ways in plan.items():
                if fnmatchcase(name, pattern):
                    for way in ways.split():
                        WAYS[way](self, module, joined)
        for one in model.parameters():
            self.cuts.setdefault(one, Cut(tuple(one.shape), self.group, summed=by_positions))

    def take(self, parameter: nn.Parameter | None, dim: int, joined: int = 1) -> None:
        """Keep this process's part of a parameter, along a dimension. A tied one is cut once."""
        if parameter is None or parameter in self.cuts:
            return
        self.cuts[parameter] = cut = Cut(tuple(parameter.shape), self.group, dim, joined)
        parameter.data = torch.empty(cut.part_shape, dtype=parameter.dtype, device=parameter.device)

    def add_up(self, module: nn.Module) -> None:
        """Keep all of a module's parameters. Each process computes a part of their gradient."""
        for one in module.parameters():
            self.cuts[one] = Cut(tuple(one.shape), self.group, summed=True)

    def around(self, compute: Callable[..., Tensor], by_positions: bool) -> Callable[..., Tensor]:
        """A model's `forward` that says whether processes have positions of their own."""

        def forward(ids: Tensor, targets: Any = None, *others: Any, **named: Any) -> Tensor:
            self.by_positions = by_positions and targets is not None
            return compute(ids, targets, *others, **named)

        return forward

    def enter(self, x: Tensor) -> Tensor:
        """The input of a layer, (B, T / N, C) or (B, T, C), to (B, T, C) on each process.

        Its gradient is the sum of those of all processes.
        """
        x = x.to(compute_dtype(x))
        if not self.by_positions:
            return self.sum_backward(x)
        from torch.distributed._functional_collectives import all_gather_single

        gathered = all_gather_single(x.contiguous(), 0, self.group)  # (N * B, T / N, C)
        return gathered.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2)

    def leave(self, part: Tensor) -> Tensor:
        """The sum of what a layer returns on all processes, (B, T, C), or this one's positions."""
        if not self.by_positions:
            return _Left.apply(part, self.group)
        from torch.distributed._functional_collectives import reduce_scatter_single

        by_process = part.unflatten(1, (self.size, -1)).transpose(0, 1)  # (N, B, T / N, C)
        return reduce_scatter_single(by_process.flatten(0, 1), "sum", 0, self.group)

    def sum_backward(self, x: Tensor) -> Tensor:
        """x as it is; its gradient is the sum of those of all processes."""
        entered: Tensor = _Entered.apply(x, self.group)
        return entered

    def own_positions(self, x: Tensor) -> Tensor:
        """This process's positions of (..., T, C), where it has some of its own."""
        return x.chunk(self.size, dim=-2)[self.rank] if self.by_positions else x

    def sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Add up gradients of which each process has a part."""
        from torch.distributed import all_reduce

        grads: list[Any] = [one.grad for one in parameters if one.grad is not None]
        local = [local_part(one) for one in grads]
        if not local:
            return
        flat = torch.cat([one.flatten() for one in local])
        all_reduce(flat, group=self.group)
        for one, added in zip(local, flat.split([one.numel() for one in local]), strict=True):
            one.copy_(added.view_as(one))


class _Entered(torch.autograd.Function):
    """x as it is; its gradient is the sum over processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


class _Left(torch.autograd.Function):
    """The sum of x over processes; each x has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    """All of (..., V) from each process's (..., R); what follows is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shares: Vocabulary) -> Tensor:
        ctx.rows = shares.rows
        return shares.gather(part.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[..., ctx.rows], None


class _Split(torch.autograd.Function):
    """Each process's (..., R) of (..., V), which is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Vocabulary) -> Tensor:
        ctx.shares = shares
        return x[..., shares.rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shares.gather(grad.contiguous()), None


def _entry(group: TensorGroup, module: Any, _: int) -> None:
    """A layer whose parts are `colwise` and `rowwise`; `colwise` itself, if others are whole."""
    first = next(iter(signature(module.forward).parameters))

    def enter(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if inputs:
            return (group.enter(inputs[0]), *inputs[1:]), named
        return inputs, {**named, first: group.enter(named[first])}

    module.register_forward_pre_hook(enter, with_kwargs=True)


def _colwise(group: TensorGroup, module: Any, joined: int) -> None:
    """A linear layer, some of whose outputs this process has."""
    layer, adapter = without_adapter(module), adapter_of(module)
    for one in (layer.weight, layer.bias):
        group.take(one, 0, joined)
    if adapter is not None:
        group.take(adapter.second.weight, 0, joined)
        group.add_up(adapter.first)


def _rowwise(group: TensorGroup, module: Any, _: int) -> None:
    """A linear layer, some of whose inputs this process has."""
    layer, adapter = without_adapter(module), adapter_of(module)
    group.take(layer.weight, 1)
    if adapter is not None:
        group.take(adapter.first.weight, 1)
        group.add_up(adapter.second)
        if isinstance(adapter.dropout, nn.Dropout):
            _share_dropout(group, adapter)

    def without_bias(x: Tensor) -> Tensor:
        return (F.linear if layer.weight.requires_grad else product)(x, layer.weight)

    layer.forward = without_bias
    compute = module.forward  # with the adapter, whose output is a part of the same sum

    def forward(x: Tensor) -> Tensor:
        output = group.leave(compute(x))
        return output if layer.bias is None else output + layer.bias.to(output.dtype)

    module.forward = forward


def _share_dropout(group: TensorGroup, adapter: Adapter) -> None:
    """Drop of this process's inputs of an adapter what one process drops of them.

    Processes that share matrices draw the same numbers. Without this, each would drop the inputs at
    the same places of its part.
    """
    dropout, whole = adapter.dropout, adapter.first.in_features
    (own,), drop = group.cuts[adapter.first.weight].ranges(), dropout.forward

    def forward(x: Tensor) -> Tensor:
        if not dropout.training:
            return x
        return x * drop(x.new_ones(*x.shape[:-1], whole))[..., own]

    dropout.forward = forward


def _embedding(group: TensorGroup, module: Any, _: int) -> None:
    """The embedding of tokens, some of which this process has."""
    vocabulary = Vocabulary(group.group, module.num_embeddings, IGNORED)
    group.take(module.weight, 0)
    look_up = module.forward  # some scale what they find
    if module.padding_idx is not None:  # the token whose row has no gradient
        own = module.padding_idx - vocabulary.rows.start
        module.padding_idx = own if 0 <= own < len(module.weight) else None

    def forward(ids: Tensor) -> Tensor:
        own = vocabulary.own(ids)
        found = look_up(own.clamp(min=0))
        return group.leave(found.masked_fill((own == IGNORED)[..., None], 0.0))

    module.forward = forward


def _positions(group: TensorGroup, module: Any, _: int) -> None:
    """An embedding of positions."""
    module.register_forward_hook(lambda _, __, output: group.own_positions(output))


def _head(group: TensorGroup, module: Head, _: int) -> None:
    """The output layer."""
    module.vocabulary = Vocabulary(group.group, module.out_features, IGNORED)
    _colwise(group, module, 1)
    _entry(group, module, 1)


def _gather(group: TensorGroup, module: Any, _: int) -> None:
    """A `colwise` layer all of whose outputs each process needs."""
    shares = Vocabulary(group.group, module.out_features, IGNORED)
    module.register_forward_hook(lambda _, __, part: _Gathered.apply(part, shares))


def _split(group: TensorGroup, module: Any, _: int) -> None:
    """A `rowwise` layer all of whose inputs each process has."""
    shares = Vocabulary(group.group, module.in_features, IGNORED)
    module.register_forward_pre_hook(lambda _, inputs: (_Split.apply(inputs[0], shares),))


def _norm(group: TensorGroup, module: Any, _: int) -> None:
    """A norm of each head: its gradient is the sum over the heads of all processes."""
    group.add_up(module)


WAYS: dict[str, Callable[[TensorGroup, Any, int], None]] = {
    "entry": _entry,
    "colwise": _colwise,
    "rowwise": _rowwise,
    "gather": _gather,
    "split": _split,
    "norm": _norm,
    "embedding": _embedding,
    "positions": _positions,
    "head": _head,
}
"""What a plan says of a module."""
