"""The Accelerator of a run: its arguments, how it wraps the model, and its precision.

Precision means the same under DDP and FSDP: weights, sums of gradients, the residual stream and the
loss are float32, and matrix products have the precision of the accelerate config file. fp16 has a
loss scaler.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import accelerate
import torch
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DynamoBackend,
    GradientAccumulationPlugin,
    ParallelismConfig,
    get_mixed_precision_context_manager,
)
from accelerate.utils.dataclasses import FP8BackendType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from config.schema import Config, ConfigError, RunConfig, TrainConfig, refuse_uneven_chunks
from data.split import Split
from model.context import Context
from model.family import LanguageModel
from model.fp8 import FP8, Fp8Error, use_fp8
from training.distributed.launcher import (
    fsdp_requested,
    is_on,
    on_cpu,
    requested_precision,
)
from training.distributed.processes import init_processes
from training.distributed.sharing import (
    TP_SIZE,
    context_size,
    data_parallel_size,
    refuse_shared_matrices,
    refuse_sharing,
    tensor_size,
)

BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
"""Names of a CPU's bf16 matrix instructions: AVX512-BF16, AMX, and Arm's."""


class MeshSizes(ParallelismConfig):
    """accelerate's sizes of a mesh, which FSDP also needs where one shard is all of the data.

    accelerate 1.15 refuses tensor parallelism alone: its launcher without FSDP, and its Accelerator
    with it. Over one process, FSDP sends nothing.
    """

    @property
    def dp_shard_enabled(self) -> bool:
        """Like accelerate's property."""
        return self.dp_shard_size > 1 or not self.cp_enabled


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator, which starts half a second faster without FSDP.

    accelerate 1.15 looks for sharded tensors in every run, and imports their module for that.
    """

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """In place of accelerate's method: `configure_wrapping` has shared out the positions.

        accelerate 1.15 has torch's experimental ring take over `F.scaled_dot_product_attention`. It
        takes no masks of documents, has no kernel for CPUs, and does not see other attention.
        """
        return args

    def _prepare_tp(self, *args: Any) -> tuple[Any, ...]:
        """In place of accelerate's method: `configure_wrapping` has shared out the matrices.

        accelerate 1.15 imports `ReplicateParallel`, which transformers 5.24 no longer has.
        """
        return args

    @property
    def seed_index(self) -> int:
        """The number of this process, but one for all processes that share matrices.

        Dropout between layers would otherwise let their copies of the other weights drift apart.
        """
        return self.process_index // tensor_size(self)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Like accelerate's method."""
        if device_placement is None and not self.is_fsdp2:
            device_placement = self.device_placement
        return super().prepare_model(model, device_placement, evaluation_mode)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Like accelerate's method."""
        if self.is_fsdp2:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    @property
    def fp8_backend(self) -> FP8BackendType:
        """Like accelerate's property. `use_fp8` converts layers before the header is printed.

        The rest of the run is one in bf16, of which accelerate knows no more.
        """
        return FP8BackendType.NO

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Like accelerate's method, which under FSDP has every micro-batch send as much as a step.

        Replicas of hybrid sharding add up their gradients once a step.
        """
        with super().accumulate(*models):
            if self.is_fsdp2:
                each = syncs_each_micro_batch(self)
                for model in models:
                    set_communication(model, last=self.sync_gradients, each=each)
            yield


def set_communication(model: Any, last: bool, each: bool) -> None:
    """Set what FSDP sends in a micro-batch, which may be the `last` of its step.

    With `each`, it reduces gradients to shards in every micro-batch, and replicas add up their
    shards in the last. Otherwise weights stay whole until the last, and gradients are whole.
    """
    model.set_requires_gradient_sync(last or each)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or each)


def accelerator_options(config: Config) -> dict[str, Any]:
    """Connect the processes of the launcher, and return the arguments of `Accelerator`.

    The Accelerator reads the accelerate config file itself. Raises ConfigError for entries of that
    file that cannot be honoured, and for a tracker that is not installed.
    """
    _refuse_missing(config.run.tracker or [])
    init_processes(timedelta(seconds=config.run.start_timeout_seconds))
    return {
        "cpu": on_cpu(),
        "parallelism_config": MeshSizes() if is_on("ACCELERATE_USE_PARALLELISM_CONFIG") else None,
        "log_with": config.run.tracker,
        "project_dir": config.run.dir,
        "mixed_precision": effective_precision(),
        "dataloader_config": DataLoaderConfiguration(split_batches=True, non_blocking=True),
        "gradient_accumulation_plugin": GradientAccumulationPlugin(
            sync_with_dataloader=False,
            sync_each_batch=fsdp_requested() and config.run.sync_each_micro_batch,
        ),
    }


def split_of(accelerator: accelerate.Accelerator, train: TrainConfig) -> Split:
    """How the sequences of a step are divided among processes and micro-batches."""
    parts = data_parallel_size(accelerator)
    return Split.of(train.global_batch_size, train.micro_batch_size, parts)


def check_configuration(accelerator: Accelerator, config: Config) -> None:
    """Derive gradient accumulation from the batch sizes and the data-parallel size.

    Raises ConfigError where a sequence or matrices cannot be divided, and for whole weights on the
    device that the accelerate config file keeps on the CPU.
    """
    refuse_uneven_chunks(config, context_size(accelerator))
    accelerator.gradient_accumulation_steps = split_of(accelerator, config.train).accumulation
    if offloads(accelerator) and not config.run.sync_each_micro_batch:
        raise ConfigError(
            "run.sync_each_micro_batch=false keeps whole weights and gradients on the device, and "
            "fsdp_offload_params: true shards on the CPU. Leave one of them out."
        )
    if tensor_size(accelerator) > 1:
        refuse_shared_matrices(config, requested_precision())


def check_model(accelerator: accelerate.Accelerator, model: LanguageModel) -> None:
    """Raise ConfigError for a model that the processes cannot divide as the config file says.

    Without fsdp_transformer_layer_cls_to_wrap, accelerate shards the blocks that the model names.
    """
    file = "The accelerate config file says"
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    named = [] if plugin is None else plugin.transformer_cls_names_to_wrap
    blocks = sorted(model._no_split_modules)
    if named and sorted(named) != blocks:
        raise ConfigError(
            f"{file} fsdp_transformer_layer_cls_to_wrap: {','.join(named)}. This model's blocks "
            f"are of the class {','.join(blocks)}: remove the entry."
        )
    tensor, context = tensor_size(accelerator), context_size(accelerator)
    says = f"{file} {TP_SIZE}: {tensor}"
    refuse_sharing(model, context, tensor, f"{file} parallelism_config_cp_size: {context}", says)
    if tensor > 1 and model.layout().packed():  # a run that began in four bits
        raise ConfigError(f"{says}, and the run keeps weights in four bits. Use FSDP alone.")


def _refuse_missing(trackers: list[str]) -> None:
    """Raise ConfigError for a name that is no installed tracker of accelerate's."""
    installed = sorted(str(tracker) for tracker in get_available_trackers())
    for name in trackers:
        if name not in installed:
            raise ConfigError(
                f"run.tracker={name} is not installed, or not supported by accelerate. Installed: "
                f"{', '.join(installed) or 'none'} (pip install -r requirements-trackers.txt)."
            )


def is_compiled(accelerator: accelerate.Accelerator) -> bool:
    """Whether the accelerator compiles the model that it prepares."""
    return bool(accelerator.state.dynamo_plugin.backend != DynamoBackend.NO)


def unwrapped(accelerator: accelerate.Accelerator, model: nn.Module) -> LanguageModel:
    """The model without the wrappers of DDP and of compilation."""
    if not is_compiled(accelerator) and not isinstance(model, DistributedDataParallel):
        # accelerate would import the compiler, for a second, to see that it is not compiled.
        return cast(LanguageModel, model)
    return cast(LanguageModel, accelerator.unwrap_model(model, keep_torch_compile=False))


def grads_in_buckets(model: nn.Module) -> bool:
    """Whether gradients are views of DDP's buckets.

    The buckets stay allocated. A gradient that is set to None is allocated again, next to them.
    """
    # When the whole model is compiled, the compiler wraps DDP.
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def syncs_each_micro_batch(accelerator: accelerate.Accelerator) -> bool:
    """Whether FSDP reduces gradients in each micro-batch (`run.sync_each_micro_batch`)."""
    return bool(accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False))


def replicas(accelerator: accelerate.Accelerator) -> int:
    """The number of whole copies of the model under FSDP: more than one with hybrid sharding."""
    sizes = accelerator.parallelism_config
    return 1 if sizes is None else int(sizes.dp_replicate_size)


def offloads(accelerator: accelerate.Accelerator) -> bool:
    """Whether FSDP keeps weights, gradients and optimizer state on the CPU."""
    return accelerator.is_fsdp2 and hasattr(accelerator.state.fsdp_plugin.cpu_offload, "pin_memory")


def effective_precision() -> str | None:
    """`mixed_precision` for the Accelerator: None keeps that of the config file; otherwise "no".

    A CPU without bf16 instructions would emulate them, up to 13 times as slowly, so it computes in
    float32. What fp8 leaves out is bf16, as in accelerate.
    """
    if requested_precision() not in ("bf16", "fp8"):
        return None
    capabilities = torch.cpu.get_capabilities()
    if on_cpu() and not any(capabilities.get(name) for name in BF16_INSTRUCTIONS):
        return "no"
    return "bf16" if requested_precision() == "fp8" else None


def convert_to_fp8(model: LanguageModel) -> None:
    """Have the model multiply in fp8 if the accelerate config file says so. A CPU emulates that.

    Raises ConfigError for a model that cannot.
    """
    if requested_precision() != FP8:
        return
    try:
        use_fp8(model, emulated=on_cpu())
    except Fp8Error as error:
        raise ConfigError(str(error)) from error


def configure_wrapping(
    accelerator: accelerate.Accelerator, model: LanguageModel, run: RunConfig
) -> None:
    """Set how `prepare` wraps the model: precision, shared sequences, how gradients are reduced.

    It also corrects what accelerate does differently for CPUs and FSDP.
    """
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None:
        # accelerate silently trains in float32 when fp16 is requested on a CPU.
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler(accelerator.device.type)
    if accelerator.parallelism_config is not None:
        # accelerate 1.15 takes a joint dimension from the mesh, which torch calls deprecated.
        warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh")
    # It says of each way to a whole tensor that a faster one might exist.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    if tensor_size(accelerator) > 1:
        model.share_matrices(accelerator.torch_device_mesh["tp"])
    if context_size(accelerator) > 1:
        group = accelerator.torch_device_mesh["cp"].get_group()
        model.share_context(Context(group))
    if accelerator.is_fsdp2:
        _configure_fsdp(accelerator, model, run)
        return
    # Gradients are views of the buckets that DDP sends: otherwise each exists twice. Buffers are
    # constants (masks, rotations), which are equal on all processes.
    accelerator.ddp_handler = DistributedDataParallelKwargs(
        broadcast_buffers=False, gradient_as_bucket_view=True
    )
    # accelerate 1.15 does not know torch's new name of it.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")


def _configure_fsdp(
    accelerator: accelerate.Accelerator, model: LanguageModel, run: RunConfig
) -> None:
    plugin = accelerator.state.fsdp_plugin
    if accelerator.device.type == "cpu" and offloads(accelerator):
        plugin.cpu_offload = replace(plugin.cpu_offload, pin_memory=False)
    if not run.sync_each_micro_batch and accelerator.gradient_accumulation_steps > 1:
        plugin.reshard_after_forward = False
    if accelerator.mixed_precision != "no":
        plugin.mixed_precision_policy = sums_in_float32(plugin.mixed_precision_policy)
        # accelerate does this for every strategy but FSDP2.
        autocast = get_mixed_precision_context_manager(True, accelerator.autocast_handler)
        model.forward = autocast(model.forward)  # type: ignore[method-assign]


def sums_in_float32(policy: Any) -> Any:
    """FSDP's policy with weights in its dtype where they are used, and gradients in float32.

    accelerate's policy sums gradients and returns the loss in 16 bits.
    """
    return replace(policy, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False)
