"""The Accelerator of a run: its arguments, whether it compiles, and how gradients accumulate."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import accelerate
from accelerate.tracking import get_available_trackers
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, TorchDynamoPlugin
from torch import Tensor, nn

from config.schema import Config, ConfigError, accumulation_steps
from training.distributed.environment import env_var, fsdp_requested, on_cpu, started_processes
from training.distributed.processes import init_processes, refuse_broken_launch
from training.distributed.strategy import DDP_OPTIONS, effective_precision

WORTH_COMPILING = 5e15
"""Floating-point operations of a process above which compiling saves time, estimated.

A GPU computes them in about a minute. The compiler takes a third of that and makes steps up to a
third faster. A CPU takes hours, and its steps are 0 to 9 percent faster (benchmarks/RESULTS.md).
"""
COMPILERS = {"cpu": ("CXX", "g++", "clang++"), "cuda": ("CC", "gcc", "clang", "cc")}
"""The environment variable from which inductor takes a compiler, and the names it looks for."""


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator, which starts half a second faster without FSDP.

    accelerate 1.15 looks for sharded tensors in every run, and imports their module for that.
    """

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


def accelerator_options(config: Config) -> dict[str, Any]:
    """Connect the processes of the launcher, and return the arguments of `Accelerator`.

    The Accelerator reads the accelerate config file itself. Raises ConfigError for entries of that
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


def dynamo_plugin_for(config: Config) -> TorchDynamoPlugin | None:
    """`dynamo_plugin` for the Accelerator: None keeps that of the config file; otherwise "no"."""
    return None if why_not_compiled(config) is None else TorchDynamoPlugin(backend="no")


def why_not_compiled(config: Config) -> str | None:
    """Why the run is not compiled although the accelerate config file requests it; else None.

    This depends on the configuration and not on the steps that are left: a resumed run must not
    change its arithmetic.
    """
    if env_var("ACCELERATE_DYNAMO_BACKEND").upper() != "INDUCTOR":  # others are for debugging
        return None
    variable, *names = COMPILERS["cpu" if on_cpu() else "cuda"]
    if not any(shutil.which(name) for name in (env_var(variable), *names) if name):
        return f"there is no compiler ({' or '.join(names)}) on this machine"
    if config.run.compile_short_runs:
        return None
    if config.model.pretrained is not None or config.model.architecture is not None:
        return (
            "the size of the model, and so the gain, is unknown before it is read. "
            "run.compile_short_runs=true compiles it"
        )
    operations = _operations(config)
    if operations < WORTH_COMPILING:
        return (
            f"this run takes {_rounded(operations)} operations per process, and compiling saves "
            f"time above about {_rounded(WORTH_COMPILING)}. run.compile_short_runs=true compiles it"
        )
    return None


def _operations(config: Config) -> float:
    """Operations of the whole run for each process: six for each block weight and token."""
    model, train = config.model, config.train
    weights = 12 * model.n_layer * model.n_embd**2
    tokens = train.max_steps * train.global_batch_size * config.data.block_size
    return 6.0 * weights * tokens / started_processes()


def _rounded(number: float) -> str:
    """'5e15'."""
    return f"{number:.0e}".replace("e+", "e")


def check_installed(names: list[str]) -> None:
    """Raise ConfigError for a name that is no installed tracker of accelerate's."""
    installed = sorted(str(tracker) for tracker in get_available_trackers())
    for name in names:
        if name not in installed:
            raise ConfigError(
                f"run.tracker={name} is not installed, or not supported by accelerate. Installed: "
                f"{', '.join(installed) or 'none'} (pip install -r requirements-trackers.txt)."
            )
