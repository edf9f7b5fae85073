"""New weights: each process draws its own shard, and the numbers are the same on every shape.

A model is built under `Recording`, which gives tensors no memory and records what would have been
written into them: which distribution, with which arguments. `NewWeights` repeats that later, for
the shard of a parameter alone. Each parameter has random numbers of its own, a function of the
seed, its name and the place in it: neither the order in which modules are built nor the number of
processes changes them.
"""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from model.layout import ALL, ModelError, Part
from model.sharded import local_part, slices_of

BLOCK = 1 << 18
"""Numbers that one seed gives. A process draws the blocks that its shard touches.

torch's generator for the CPU takes 32 bits of a seed: among a million blocks, about a hundred pairs
get the same. Smaller blocks would be more.
"""
ATEN = torch.ops.aten
EMPTY, RANDOM = (ATEN.empty, ATEN.empty_strided), (ATEN.rand, ATEN.randn, ATEN.normal)
"""New tensors that have no values, or random ones. All others are constants."""
READ_VALUES = {
    name: getattr(nn.init, name) for name in ("trunc_normal_", "orthogonal_", "sparse_", "dirac_")
}
"""Functions of torch that do nothing to a tensor without memory, and so are recorded whole."""
DRAWS = (ATEN.normal_.default, ATEN.uniform_.default, READ_VALUES["trunc_normal_"])
OVERWRITES = (*DRAWS, ATEN.zero_.default, ATEN.fill_.Scalar)
"""What was in the tensor before does not matter."""
ELEMENTWISE = (
    *(*OVERWRITES, ATEN.mul_.Tensor, ATEN.mul_.Scalar, ATEN.div_.Tensor, ATEN.div_.Scalar),
    *(ATEN.add_.Tensor, ATEN.add_.Scalar, ATEN.sub_.Tensor, ATEN.sub_.Scalar, ATEN.clamp_.default),
)
"""Each number is drawn or computed without its neighbours, so a block can be, too."""
END = sys.maxsize
"""The place after all that is recorded."""


@dataclass(frozen=True)
class _Write:
    """An operation that would have written into a tensor without memory."""

    place: int
    """Its number among all that are recorded."""
    operation: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    result: Any
    """The new tensors that it returned, if it did not write into its arguments."""


class Recording(TorchDispatchMode):
    """Inside, new tensors have no memory, and what is written into them is recorded.

    Constants, such as `torch.arange(8)`, have their values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes: dict[int, list[_Write]] = defaultdict(list)
        """By the storage of the tensor."""
        self._count = 0
        self._replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, for a second, only to skip this class

    def __enter__(self) -> Recording:
        tables = [vars(nn.init)]
        if "transformers" in sys.modules:  # it finds torch's functions in a table of its own
            tables.append(import_module("transformers.initialization").TORCH_INIT_FUNCTIONS)
        for table in tables:
            self._replaced.append((table, {name: table[name] for name in READ_VALUES}))
            for name, function in READ_VALUES.items():
                table[name] = partial(self._record_whole, function)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for table, before in self._replaced:
            table.update(before)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        if not any(one.is_meta for one in given):
            if not given and func.overloadpacket in (*EMPTY, *RANDOM):
                kwargs = {**kwargs, "device": "meta"}
            result = func(*args, **kwargs)
            new = [one for one in _tensors(result) if one.is_meta]
            if new and func.overloadpacket not in EMPTY:
                self._record(func, args, kwargs, new, result)
            return result
        written = _written(func, args, kwargs)
        if written and torch.Tag.inplace_view not in func.tags:
            if not all(one.is_meta for one in written):
                raise NotImplementedError(f"{func} writes weights without values into a constant")
            self._record(func, args, kwargs, written)
            return written[0] if len(written) == 1 else tuple(written)
        on_meta = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
        shapes, options = tree_map_only(Tensor, lambda one: one.to("meta"), (args, on_meta))
        result = func(*shapes, **options)
        known = {_storage(one) for one in given if one.is_meta}
        if new := [one for one in _tensors(result) if _storage(one) not in known]:  # not a view
            self._record(func, args, kwargs, new, result)
        return result

    def _record_whole(
        self, function: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if not tensor.is_meta:
            return function(tensor, *args, **kwargs)
        self._record(function, (tensor, *args), kwargs, [tensor])
        return tensor

    def _record(
        self, operation: Any, args: Any, kwargs: Any, written: list[Tensor], result: Any = None
    ) -> None:
        self._count += 1
        # Whoever assigns to `.data` later gives the same object another storage.
        kept = tree_map_only(Tensor, _alias, (args, kwargs, result))
        write = _Write(self._count, operation, *kept)
        for storage in {_storage(one) for one in written}:
            self.writes[storage].append(write)


class NewWeights:
    """What the parameters of a new model begin with. It takes no memory of their size."""

    def __init__(self, recording: Recording, parameters: Mapping[str, Tensor]) -> None:
        """`parameters`: those that were built under `recording`, by name, tied ones once."""
        self._writes = recording.writes
        self._parameters = {name: one.detach() for name, one in parameters.items() if one.is_meta}
        self._names = {_storage(one): name for name, one in self._parameters.items()}

    def refuse_incomplete(self) -> None:
        """Raise ModelError for a parameter whose first values are not known."""
        for name, one in self._parameters.items():
            if not self._is_known(one, END):
                raise ModelError(
                    f"cannot be trained from new weights: nothing that was recorded gives {name} a "
                    "value. Begin with the weights of such a model (model.pretrained)"
                )

    def _is_known(self, tensor: Tensor, before: int) -> bool:
        """Whether all that the values of a tensor depend on was recorded."""
        writes = self._live(tensor, before)
        return bool(writes) and all(
            self._is_known(one, write.place)
            for write in writes
            for one in _tensors((write.arguments, write.keywords))
            if one.is_meta and _storage(one) != _storage(tensor)
        )

    @torch.no_grad()
    def draw(self, name: str, target: Tensor, seed: int, part: Part = ALL) -> None:
        """Fill a parameter, or this process's shard of it, and draw no more blocks than it touches.

        `target` may be a part of the parameter that was recorded. A parameter that was built with
        its values keeps them.
        """
        if (source := self._parameters.get(name)) is None:
            return
        local = local_part(target)
        slices = part.within(slices_of(target), target.shape[0] if target.dim() else 1)
        if not local.numel():  # with many processes, some have no part of a small tensor
            return
        if not self._is_elementwise(source, END):
            local.copy_(self._whole(source, END, seed, {})[slices])  # one parameter at a time
            return
        rows = (*local.shape[:1], *source.shape[1:])
        begin = slices[0].start * prod(rows[1:]) if slices else 0
        in_place = local.device.type == "cpu" and local.dtype == source.dtype
        if in_place and local.shape == rows and local.is_contiguous():
            self._draw_range(source, END, seed, begin, local.view(-1))
        else:
            numbers = torch.empty(rows, dtype=source.dtype)
            self._draw_range(source, END, seed, begin, numbers.view(-1))
            local.copy_(numbers[(slice(None), *slices[1:])] if slices else numbers)

    @torch.no_grad()
    def value(self, tensor: Tensor, name: str) -> Tensor:
        """Another tensor that was built under the recording, such as a buffer."""
        with _seeded(_seed_of(0, name)):
            return self._whole(tensor, END, 0, {})

    def _live(self, tensor: Tensor, before: int) -> list[_Write]:
        """What was written into a tensor's storage before a place, from the last overwrite on."""
        writes = [one for one in self._writes.get(_storage(tensor), ()) if one.place < before]
        for i in range(len(writes) - 1, -1, -1):
            if writes[i].operation in OVERWRITES and _is_whole(writes[i].arguments[0]):
                return writes[i:]
        return writes

    def _is_elementwise(self, source: Tensor, before: int) -> bool:
        """Whether each block of a parameter can be drawn without the others."""
        writes = self._live(source, before)
        return (
            bool(writes)
            and _is_whole(source)
            and writes[0].operation in OVERWRITES
            and all(
                write.operation in ELEMENTWISE
                and _is_whole(write.arguments[0])
                and not _tensors((write.arguments[1:], write.keywords))
                for write in writes
            )
        )

    def _draw_range(self, source: Tensor, before: int, seed: int, begin: int, into: Tensor) -> None:
        """Fill `into`, which are the numbers of the flat parameter from `begin` on."""
        writes, name = self._live(source, before), self._names[_storage(source)]
        end, generator = begin + into.numel(), torch.Generator()
        for block in range(begin // BLOCK, -(-end // BLOCK)):
            first, last = block * BLOCK, min((block + 1) * BLOCK, source.numel())
            low, high = max(first, begin), min(last, end)
            part = into[low - begin : high - begin]
            # What torch draws depends on the length, so a block is always drawn whole.
            is_whole = (low, high) == (first, last)
            numbers = part if is_whole else torch.empty(last - first, dtype=into.dtype)
            generator.manual_seed(_seed_of(seed, name, block))
            for write in writes:
                drawn = {"generator": generator} if write.operation in DRAWS else {}
                write.operation(numbers, *write.arguments[1:], **{**write.keywords, **drawn})
            if not is_whole:
                part.copy_(numbers[low - first : high - first])

    def _whole(
        self, tensor: Tensor, before: int, seed: int, known: dict[tuple[int, int], Tensor]
    ) -> Tensor:
        """A tensor as it was before the write of a place.

        The values of a parameter are a function of its name. Any other tensor is drawn from torch's
        generator, once: `known` has its values by storage and number of writes.
        """
        storage, writes = _storage(tensor), self._live(tensor, before)
        name = self._names.get(storage)
        size = tensor.untyped_storage().nbytes() // tensor.itemsize
        values = torch.empty(size, dtype=tensor.dtype)
        if name is not None and self._is_elementwise(tensor, before):
            self._draw_range(tensor, before, seed, 0, values)
            return _as(values, tensor)
        with nullcontext() if name is None else _seeded(_seed_of(seed, name)):
            for write in writes:
                if name is None and (storage, write.place) in known:
                    values = known[storage, write.place].clone()
                    continue
                self._repeat(write, storage, values, seed, known)
                if name is None:
                    known[storage, write.place] = values.clone()
        return _as(values, tensor)

    def _repeat(
        self,
        write: _Write,
        storage: int,
        values: Tensor,
        seed: int,
        known: dict[tuple[int, int], Tensor],
    ) -> None:
        """Write into `values`, the memory of `storage`, what was recorded."""

        def with_memory(one: Tensor) -> Tensor:
            if not one.is_meta:
                return one
            if _storage(one) == storage and write.result is None:
                return _as(values, one)
            return self._whole(one, write.place, seed, known)

        args, kwargs = tree_map_only(Tensor, with_memory, (write.arguments, write.keywords))
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        made = write.operation(*args, **kwargs)
        for shape, one in zip(_tensors(write.result), _tensors(made), strict=False):
            if _storage(shape) == storage:
                _as(values, shape).copy_(one)


def _tensors(nested: Any) -> list[Tensor]:
    return [one for one in tree_leaves(nested) if isinstance(one, Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments into which an operation writes."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            written += _tensors(given)
    return written


def _alias(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.is_meta else tensor


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage, in order."""
    nbytes = tensor.numel() * tensor.itemsize
    return tensor.is_contiguous() and nbytes == tensor.untyped_storage().nbytes()


def _as(values: Tensor, tensor: Tensor) -> Tensor:
    """The part of a storage's values that a tensor without memory stands for."""
    return values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _seed_of(seed: int, name: str, block: int = 0) -> int:
    digest = hashlib.sha256(f"{seed} {name} {block}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generator of the CPU, and restore it."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
