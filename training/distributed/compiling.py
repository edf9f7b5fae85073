"""Whether a run is compiled: the accelerate config file requests it and it saves time."""

from __future__ import annotations

import shutil

from accelerate.utils import TorchDynamoPlugin

from config.schema import Config
from training.distributed.environment import env_var, on_cpu, started_processes

WORTH_COMPILING = 5e15
"""Floating-point operations of a process above which compiling saves time.

An estimate: about a minute of a GPU. The compiler takes a third of that, and the steps are then up
to a third faster. On a CPU this takes hours, and steps are 0 to 9 percent faster
(benchmarks/RESULTS.md).
"""
COMPILERS = {"cpu": ("CXX", "g++", "clang++"), "cuda": ("CC", "gcc", "clang", "cc")}
"""The compilers that inductor uses: their environment variable, and the names it searches."""


def dynamo_plugin_for(config: Config) -> TorchDynamoPlugin | None:
    """`dynamo_plugin` for the Accelerator: None for the config file's own, or "no"."""
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
