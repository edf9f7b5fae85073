"""The loss of a model of transformers, without all of its logits in memory.

transformers computes the logits of all positions, and some architectures scale or cap them
afterwards. `find_steps` finds out what one does to them: it calls transformers' own `forward`,
around a body and an output layer that compute nothing. `OutputLayer` then computes the loss in
chunks, as `Head` does for our GPT.

Letters in shapes: B batch, T time (positions), C channels, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model.head import Head, Step, Steps

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
ARITHMETIC = ("mul", "div")
OTHERS = ("tanh", "float")
CHANGES_NOTHING = "contiguous"


class OutputLayer(Head):
    """The output layer of a model of transformers, whose `forward` passes it hidden states alone.

    With `targets` it returns their mean loss in place of logits. What the architecture does to
    logits, it then does to one number, which nobody reads: the loss is `loss`.
    """

    targets: Tensor | None = None
    loss: Tensor | None = None

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Hidden (B, T, C) to logits (B, T, V), or, with `targets` (B, T), their loss (1, 1, 1)."""
        if self.targets is None:
            return super().forward(hidden, targets)
        # FSDP's hook for the backward pass is on what a module returns, which may be no view.
        self.loss = super().forward(hidden, self.targets).repeat(1, 1, 1)
        return self.loss

    def loss_in(self, forward: Callable[[], object], targets: Tensor) -> Tensor:
        """The mean loss of targets (B, T) in a forward pass that calls this layer once."""
        self.targets = targets
        try:
            forward()
            assert self.loss is not None, "the model has called its output layer"
            return self.loss.sum()  # of one number
        finally:
            self.targets = self.loss = None


def use_output_layer(lm: nn.Module) -> None:
    """Give the output layer of a model of transformers the class `OutputLayer`.

    It stays as it is if what the model does to its logits is more than `Steps` can say.
    """
    layer: Any = lm.get_output_embeddings()  # type: ignore[operator]
    steps = find_steps(lm) if type(layer) is nn.Linear else None
    if steps is not None:
        layer.__class__, layer.steps = OutputLayer, steps


def find_steps(lm: nn.Module) -> Steps | None:
    """What `forward` of a model of transformers does to its logits; None if it cannot be said."""
    layer: Any = lm.get_output_embeddings()  # type: ignore[operator]
    names = {module: name for name, module in lm.named_children()}
    if layer not in names:
        return None
    others = {name: _Body(module) for module, name in names.items() if module is not layer}
    without_work = copy.copy(lm)
    without_work._modules = {**lm._modules, **others, names[layer]: _Layer(layer)}
    try:
        found = without_work(input_ids=torch.zeros((1, 2), dtype=torch.int64)).logits
    except Exception:  # each architecture raises its own types
        return None
    return _steps_of(found.calls) if isinstance(found, _Recorded) else None


def _steps_of(calls: tuple[Call, ...]) -> Steps | None:
    steps: list[Step] = []
    for name, others, options in calls:
        number = others[0] if len(others) == 1 else None
        if name in ARITHMETIC and isinstance(number, int | float) and not options:
            steps.append((name, float(number)))
        elif name in OTHERS and not others and not options:
            steps.append((name, None))
        elif name != CHANGES_NOTHING:
            return None
    return tuple(steps)


class _Recorded:
    """Stands for a tensor, and notes what is computed from it: names, other arguments, options."""

    shape = (1, 2, 1)

    def __init__(self, *calls: Call) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Callable[..., _Recorded]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: _Recorded(*self.calls, (name, args, options))

    def __getitem__(self, index: Any) -> _Recorded:
        return _Recorded(*self.calls, ("getitem", (index,), {}))

    def __mul__(self, other: Any) -> _Recorded:
        return _Recorded(*self.calls, ("mul", (other,), {}))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> _Recorded:
        return _Recorded(*self.calls, ("div", (other,), {}))

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> _Recorded:
        first, *others = args
        return _Recorded(*first.calls, (func.__name__, tuple(others), kwargs or {}))


class _Body(nn.Module):
    """Looks like a part of a model, and returns hidden states at once."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["real"] = body

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["real"], name)
        return self if isinstance(found, nn.Module) else found

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output()


class _Layer(nn.Module):
    """Looks like an output layer, and returns logits at once."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, hidden: _Recorded) -> _Recorded:
        return _Recorded()


class _Output:
    """What a body returns: its hidden states, and nothing else that a model may ask for."""

    def __init__(self) -> None:
        self.last_hidden_state = _Recorded()

    def __getitem__(self, index: Any) -> _Recorded | None:
        return self.last_hidden_state if index in (0, "last_hidden_state") else None

    def __getattr__(self, name: str) -> None:
        return None
