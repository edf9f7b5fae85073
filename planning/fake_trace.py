"""Trace of an update on fake tensors: all allocations, without the memory or the arithmetic.

It runs the real model and optimizer with the real wrapping of DDP or FSDP, as process 0 of a fake
process group. No GPU is needed: the tensors are fake CPU tensors, and planning/kernels.py replaces
the operations for which CUDA saves other tensors for the backward pass.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from config.schema import OptimConfig
from model.causal_lm import CausalLMConfig
from model.context import Context
from model.families import build_model
from model.family import LanguageModel, ModelConfig
from model.frozen import AUTO, FLOAT32, keep_frozen
from planning.allocation_log import LiveBytes
from planning.kernels import cuda_kernels, few_chunks, transformers_without_values, without_moving
from training.distributed.accelerator import set_communication, sums_in_float32
from training.step import freeze, make_optimizer

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CUDA_GRANULE = 512
"""CUDA's allocator rounds sizes up to multiples of this many bytes."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """Device, precision and processes of a run, how the model is sharded, and what is trained."""

    device: str = "cuda"
    precision: str = "no"
    processes: int = 1
    shards: int = 1
    """Processes over which FSDP shards a copy of the model, or what `tensor` leaves of it: without
    that, 1 is DDP, all of them FSDP, others hybrid."""
    optimizer: str = "adamw"
    freeze: tuple[str, ...] = ()
    """Patterns of the parameters that are not trained."""
    frozen_dtype: str = AUTO
    """How those are kept, one of `model.frozen.KINDS`; also with adapters."""
    stored_as: str = FLOAT32
    """The dtype of the base in its files, one of `model.frozen.DTYPES`."""
    packed: bool = False
    """Whether documents in a row do not attend to each other."""
    sync_each: bool = True
    """`run.sync_each_micro_batch`: FSDP sends in each micro-batch of a step."""
    context: int = 1
    """Processes among those of a copy that share each sequence."""
    tensor: int = 1
    """Processes that share each matrix."""

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP wraps the model; alone with shared matrices, it sends nothing."""
        return self.shards > 1 or self.tensor > 1

    @property
    def copies(self) -> int:
        """Copies of the model: processes of DDP, replicas of hybrid sharding."""
        return self.processes // (self.shards * self.tensor)

    @property
    def parts(self) -> int:
        """Parts of a global batch: processes that share sequences or matrices have one."""
        return self.processes // (self.context * self.tensor)


def _bare_model(config: ModelConfig, shape: Shape) -> LanguageModel:
    with without_moving():
        model = build_model(config)
    freeze(model, shape.freeze)
    keep_frozen(model, shape.frozen_dtype, shape.stored_as, filled=False)
    return model


def traced_update(config: ModelConfig, micro_batch_size: int, shape: Shape) -> LiveBytes:
    """The allocations of an update, which follows an earlier one.

    It has two micro-batches: further ones are like the second. Places are ("start" | "head",
    micro), ("forward" | "backward", micro, layer), ("clip",) and ("update",).
    """
    on_cpu = shape.device == "cpu"
    tracker = LiveBytes(1 if on_cpu else CUDA_GRANULE, as_gloo=on_cpu)
    kernels, fakes = contextlib.ExitStack(), contextlib.ExitStack()
    if isinstance(config, CausalLMConfig):
        fakes.enter_context(transformers_without_values(shape.packed))
    kernels.enter_context(few_chunks())
    if shape.device == "cuda":
        kernels.enter_context(cuda_kernels())
    with (
        _fake_process_group(shape) as mesh,
        FakeTensorMode(allow_non_fake_inputs=True),
        fakes,
    ):
        bare = _bare_model(config, shape)
        if shape.tensor > 1:
            assert mesh is not None, "FSDP shards the parts of matrices"
            bare.share_matrices(mesh["tensor"])
        if shape.context > 1:
            sharing = range(0, shape.context * shape.tensor, shape.tensor)
            bare.share_context(Context(dist.new_group(sharing)))
        model: nn.Module = bare if mesh is None else _sharded(bare, mesh, shape)
        ids = torch.zeros(micro_batch_size, config.block_size, dtype=torch.int64)
        batch = (ids, ids, ids) if shape.packed else (ids, ids)  # inputs, targets, positions
        tracker.mark(list(model.parameters()), "parameters")
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: tracker.mark([parameter.grad], "gradients")
            )
        optim = OptimConfig(name=shape.optimizer)
        optimizer = make_optimizer(bare, optim, CPU, shape.precision)
        with tracker, kernels:
            # An earlier update, which creates the optimizer's state.
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
                tracker.mark([parameter.grad], "gradients")
            optimizer.step()
            # Under DDP gradients are views of its buckets, which stay allocated.
            set_to_none = shape.processes == 1 or shape.is_fsdp
            optimizer.zero_grad(set_to_none)
            for state in optimizer.state.values():
                tracker.mark(state.values(), "optimizer")
            _track_layers(list(bare.blocks), tracker)
            for micro in (0, 1):
                tracker.place = ("start", micro)
                if mesh is not None:
                    set_communication(model, last=micro == 1, each=shape.sync_each)
                # Autocast frees its copies of the weights at its end.
                with torch.autocast("cpu", DTYPES[shape.precision], shape.precision != "no"):
                    loss = model(*batch)
                (loss.float() / 2).backward()
                del loss
            tracker.place = ("clip",)
            nn.utils.clip_grad_norm_(parameters, 1.0, 2.0)
            tracker.place = ("update",)
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    return tracker


def _track_layers(blocks: list[nn.Module], tracker: LiveBytes) -> None:
    """Set the tracker's place in each block, in the forward and the backward pass."""

    def enter(layer: int) -> None:
        if torch._C._current_graph_task_id() == -1:  # not in recomputation
            tracker.place = ("forward", tracker.place[1], layer)

    def leave(layer: int, output: Any) -> None:
        hidden: Tensor = tree_leaves(output)[0]  # some blocks return a tuple that begins with it
        if torch._C._current_graph_task_id() != -1 or not hidden.requires_grad:
            return
        if layer == len(blocks) - 1:
            tracker.place = ("head", tracker.place[1])
        hidden.register_hook(lambda _: descend(layer))

    def descend(layer: int) -> None:
        tracker.place = ("backward", tracker.place[1], layer)

    for layer, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda _, __, layer=layer: enter(layer))
        block.register_forward_hook(lambda _, __, output, layer=layer: leave(layer, output))


@contextlib.contextmanager
def _fake_process_group(shape: Shape) -> Iterator[DeviceMesh | None]:
    """A fake process group of which only this process exists, and its mesh if there are shards.

    The mesh reads the values of its own tensors, so it must exist before fake tensors do.
    """
    if shape.processes == 1:
        yield None
        return
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # as in a run
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape.processes)
    try:
        with _meshes_with_values():
            if not shape.is_fsdp:
                yield None
                return
            sizes = {"replicate": shape.copies, "shard": shape.shards, "tensor": shape.tensor}
            yield init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    finally:
        dist.destroy_process_group()


def _meshes_with_values() -> contextlib.AbstractContextManager[Any]:
    """Have FSDP and Muon make their meshes outside of fake tensors: they read their numbers."""

    def with_values(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                return make(*args, **options)

        return staticmethod(made)

    names = ("_concatenate", "from_group")
    makers = {name: with_values(getattr(DeviceMesh, name)) for name in names}
    return patch.multiple(DeviceMesh, **makers)


def _sharded(model: LanguageModel, mesh: DeviceMesh, shape: Shape) -> nn.Module:
    """Wrap the model for FSDP with the function that `Accelerator.prepare` uses."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=shape.sync_each,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=list(model._no_split_modules),
        cpu_ram_efficient_loading=False,
    )
    if shape.precision != "no":
        plugin.set_mixed_precision(shape.precision)
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    plugin.mixed_precision_policy = sums_in_float32(policy)
    names = ("replicate", "shard") if shape.copies > 1 else ("shard",)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh={names: mesh[names]},
        parallelism_config=SimpleNamespace(fsdp_dim_names=names),
        mixed_precision=shape.precision,
        is_main_process=False,
        device=CPU,
    )
    prepared: nn.Module = fsdp2_prepare_model(accelerator, model)
    return prepared
