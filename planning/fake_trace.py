"""The phases of a run on fake tensors: all of their allocations, none of the memory or arithmetic.

The real model, the real optimizer and the real wrapping of DDP and FSDP, as process 0 of a group
that is only pretended and talks to nobody. So that no GPU is needed, all of it happens on fake CPU
tensors; where CUDA's kernels keep other things for the backward pass, `_cuda_kernels` stands in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import model.gpt
from config.schema import OptimConfig
from model.gpt import GPT, GPTConfig, KeyValueCache
from planning.allocation_log import LiveBytes
from training.distributed.precision import sums_in_float32
from training.distributed.refusals import BLOCK
from training.distributed.strategy import DDP_OPTIONS, grads_in_buckets
from training.optimizer import adamw
from training.sampling import CHARACTERS

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CUDA_GRANULE = 512
"""CUDA's allocator hands out multiples of it."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """Who computes, and in what precision."""

    device: str = "cuda"
    precision: str = "no"
    processes: int = 1
    shards: int = 1
    """Processes that share one copy of the model: 1 is DDP, all of them FSDP, between is hybrid."""


def traced_phases(config: GPTConfig, micro_batch_size: int, shape: Shape) -> LiveBytes:
    """The ledger of one update of two micro-batches (as good as more), after an earlier one, and of
    the evaluation and the sample that follow it.

    Places are ("start" | "forward" | "head" | "backward", phase, layer) and ("update",), the phase
    being the number of a micro-batch, "evaluation" or "sampling".
    """
    half = shape.precision != "no"
    tracker = LiveBytes(CUDA_GRANULE if shape.device == "cuda" else 1)
    kernels = _cuda_kernels(half) if shape.device == "cuda" else contextlib.nullcontext()
    with _fake_process_group(shape) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        bare = GPT(config)
        model: nn.Module = bare if mesh is None else _sharded(bare, mesh, shape)
        ids = torch.zeros(micro_batch_size, config.block_size, dtype=torch.int64)
        parameters = list(model.parameters())
        tracker.mark(parameters, "parameters")
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: tracker.mark([parameter.grad], "gradients")
            )
        optimizer = adamw(model, OptimConfig(), CPU)
        with tracker, kernels:
            # The update before, which makes the optimizer's state.
            if mesh is None and shape.processes > 1:
                model = _replicated(model, tracker)
                model(ids[:1, :1], ids[:1, :1]).backward()
            else:
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not grads_in_buckets(model))
            tracker.traffic.clear()
            for state in optimizer.state.values():
                tracker.mark(state.values(), "optimizer")
            _follow(list(bare.transformer.h), tracker)
            for micro in (0, 1):
                tracker.place = ("start", micro)
                quiet = micro == 0 and isinstance(model, DistributedDataParallel)
                with model.no_sync() if quiet else contextlib.nullcontext():  # type: ignore
                    loss = _forward(model, shape, ids, ids)
                    (loss.float() / 2).backward()
                del loss
            tracker.place = ("update",)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not grads_in_buckets(model))
            with torch.no_grad():
                model.eval()
                tracker.place = ("start", "evaluation")
                _forward(model, shape, ids, ids)
                tracker.place = ("start", "sampling")
                _sample(bare, shape)
    return tracker


def _forward(model: nn.Module, shape: Shape, *inputs: Tensor, **options: Any) -> Tensor:
    """Under autocast, which lets go of its copies of the weights when the pass is over."""
    with torch.autocast("cpu", DTYPES[shape.precision], enabled=shape.precision != "no"):
        result: Tensor = model(*inputs, **options)
    return result


def _sample(model: GPT, shape: Shape) -> None:
    """The last characters of a sample, as `model.generate` draws them: those take the most."""
    config, dtype = model.config, DTYPES[shape.precision]
    held = min(config.block_size, CHARACTERS) - 1
    size = (1, config.n_head, held, config.n_embd // config.n_head)
    cache = KeyValueCache(config.n_layer)
    for layer in range(config.n_layer if held else 0):
        cache.extend(layer, torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype))
    window = torch.zeros(1, config.block_size, dtype=torch.int64)
    logits = _forward(model, shape, window[:, :1], cache=cache)
    if config.block_size <= CHARACTERS:  # the window slides, and the cache stays as it is
        for _ in range(2):  # while the logits of the character before are still there
            halves = _forward(model, shape, window)
            logits = halves.float() if shape.shards == 1 else halves  # accelerate does, without
            del halves
    del logits


def _follow(blocks: list[nn.Module], tracker: LiveBytes) -> None:
    """Have the tracker know in which block of which micro-batch the update is."""

    def enter(layer: int) -> None:
        if torch._C._current_graph_task_id() == -1:  # not when it is recomputed
            tracker.place = ("forward", tracker.place[1], layer)

    def leave(layer: int, output: Tensor) -> None:
        if torch._C._current_graph_task_id() != -1 or not output.requires_grad:
            return
        if layer == len(blocks) - 1:
            tracker.place = ("head", tracker.place[1])
        output.register_hook(lambda _: descend(layer))

    def descend(layer: int) -> None:
        tracker.place = ("backward", tracker.place[1], layer)

    for layer, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda _, __, layer=layer: enter(layer))
        block.register_forward_hook(lambda _, __, output, layer=layer: leave(layer, output))


@contextlib.contextmanager
def _fake_process_group(shape: Shape) -> Iterator[DeviceMesh | None]:
    """A process group whose other members do not exist, and the mesh where there are shards.

    The mesh reads its own numbers, so it has to be made before there are fake tensors.
    """
    if shape.processes == 1:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape.processes)
    try:
        replicas = shape.processes // shape.shards
        if shape.shards == 1:
            yield None
        elif replicas == 1:
            yield init_device_mesh("cpu", (shape.shards,), mesh_dim_names=("shard",))
        else:
            yield init_device_mesh(
                "cpu", (replicas, shape.shards), mesh_dim_names=("replicate", "shard")
            )
    finally:
        dist.destroy_process_group()


def _sharded(model: GPT, mesh: DeviceMesh, shape: Shape) -> nn.Module:
    """As `Accelerator.prepare` does it, by the same function of accelerate's."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[BLOCK],
        cpu_ram_efficient_loading=False,
    )
    if shape.precision != "no":
        plugin.set_mixed_precision(shape.precision)
        plugin.mixed_precision_policy = sums_in_float32(plugin.mixed_precision_policy)
    names = mesh.mesh_dim_names
    stand_in = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh={names: mesh},
        parallelism_config=SimpleNamespace(fsdp_dim_names=names),
        mixed_precision=shape.precision,
        is_main_process=False,
        device=CPU,
    )
    prepared: nn.Module = fsdp2_prepare_model(stand_in, model)
    return prepared


def _replicated(model: nn.Module, tracker: LiveBytes) -> DistributedDataParallel:
    """As `Accelerator.prepare` does it; the fake group gives no sums back, so they are made up."""
    before = len(tracker.log.lifetimes)
    replicated = DistributedDataParallel(model, init_sync=False, **DDP_OPTIONS.to_kwargs())
    for lifetime in tracker.log.lifetimes[before:]:
        lifetime.kind = "buffers"

    # Without annotations, which DDP would read.
    def summed(_, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        tracker.traffic[tracker.place[:2], "allreduce"] += bucket.buffer().nbytes
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    replicated.register_comm_hook(None, summed)
    replicated.reducer = cast(Any, _KeptBuckets(replicated.reducer))
    return replicated


class _KeptBuckets:
    """DDP's reducer, which does not make its buckets again in the order in which gradients came.

    It would tell the others that order, in numbers, which fake tensors have not. The new buckets
    are as large together.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


@contextlib.contextmanager
def _cuda_kernels(half: bool) -> Iterator[None]:
    """What CUDA keeps for the backward pass, where that is not what the CPU keeps.

    Dropout is one kernel with a mask of a byte a number. Attention is fused also with dropout, the
    mask of which is drawn again. Autocast computes the loss in float32, of fp16 without a copy.
    Functions are exchanged, not a mode set: a mode does not reach what checkpointing recomputes.
    """
    attention: Any = F.scaled_dot_product_attention

    def fused_attention(*args: Tensor, dropout_p: float = 0.0, **options: bool) -> Tensor:
        mixed: Tensor = attention(*args, **options)
        return mixed

    def fused_dropout(
        x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        dropped: Tensor = torch.native_dropout(x, p, training)[0] if training and p > 0 else x
        return dropped

    def loss_in_float32(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
        if logits.dtype == torch.float16:
            logarithms = torch._log_softmax(logits, 1, True)
        else:
            logarithms = torch.log_softmax(logits, 1, dtype=torch.float32)
        return F.nll_loss(logarithms, targets, **options)

    stand_ins: dict[tuple[Any, str], Any] = {
        (F, "scaled_dot_product_attention"): fused_attention,
        (F, "dropout"): fused_dropout,
        (model.gpt, "use_matmul_attention"): lambda query: False,
    }
    if half:
        stand_ins[F, "cross_entropy"] = loss_in_float32
    kept = {(module, name): getattr(module, name) for module, name in stand_ins}
    try:
        for (module, name), function in stand_ins.items():
            setattr(module, name, function)
        yield
    finally:
        for (module, name), function in kept.items():
            setattr(module, name, function)
