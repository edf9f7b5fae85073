"""A run's Accelerator, and its arguments from the accelerate config file and the configuration."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import accelerate
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch import Tensor, nn

from config.schema import Config, accumulation_steps
from training.distributed.compiling import dynamo_plugin_for
from training.distributed.environment import fsdp_requested, on_cpu
from training.distributed.launch import init_processes, refuse_broken_launch
from training.distributed.precision import effective_precision
from training.distributed.strategy import DDP_OPTIONS
from training.reporting.track import check_installed


class Accelerator(accelerate.Accelerator):
    """accelerate's, which looks for torch's sharded tensors only where it shards.

    accelerate 1.15 looks in every run, and the import of their module takes half a second.
    """

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As accelerate's."""
        if device_placement is None and not self.is_fsdp2:
            device_placement = self.device_placement
        return super().prepare_model(model, device_placement, evaluation_mode)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """As accelerate's."""
        if self.is_fsdp2:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def accelerator_options(config: Config) -> dict[str, Any]:
    """Connect the processes of the launcher, and return the arguments of `Accelerator`.

    What the accelerate config file says needs no argument. Raises ConfigError for entries of that
    file that cannot be honoured, and for a tracker that is not installed.
    """
    check_installed(config.run.tracker or [])
    init_processes(timedelta(seconds=config.run.start_timeout_seconds))
    return {
        "cpu": on_cpu(),
        "mixed_precision": effective_precision(config.run),
        "dynamo_plugin": dynamo_plugin_for(config),
        "dataloader_config": DataLoaderConfiguration(split_batches=True, non_blocking=True),
        "gradient_accumulation_plugin": GradientAccumulationPlugin(
            sync_with_dataloader=False,
            sync_each_batch=fsdp_requested(),  # otherwise each process would hold all gradients
        ),
        "kwargs_handlers": [DDP_OPTIONS],
    }


def micro_batch_shape(accelerator: Accelerator, config: Config) -> tuple[int, int]:
    """The shape (B, T) of the micro-batch of one process."""
    parts = accelerator.gradient_accumulation_steps * accelerator.num_processes
    return config.train.global_batch_size // parts, config.data.block_size


def set_accumulation(accelerator: Accelerator, config: Config) -> None:
    """Derive gradient accumulation from the batch sizes and the number of processes.

    Raises ConfigError where the launch is broken, or the global batch cannot be divided.
    """
    refuse_broken_launch(accelerator)
    steps = accumulation_steps(config.train, accelerator.num_processes)
    accelerator.gradient_accumulation_steps = steps
