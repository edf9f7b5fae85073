"""Whether a run is compiled: where the accelerate config file asks for it, and it pays."""

from __future__ import annotations

import shutil

from accelerate.utils import TorchDynamoPlugin

from config.schema import Config
from training.distributed.environment import env_var, is_on, on_cpu, started_processes

WORTH_COMPILING = 5e15
"""Operations of a process from which on compiling is won back.

An estimate: about a minute of a GPU. The compiler takes a third of it, and the steps are then up to
a third faster. On a CPU, where it is hours, they are 0 to 9 percent faster (benchmarks/RESULTS.md).
"""
COMPILERS = {"cpu": ("CXX", "g++", "clang++"), "cuda": ("CC", "gcc", "clang", "cc")}
"""What inductor builds with: the environment's name for it, and those that it looks for."""


def dynamo_plugin_for(config: Config) -> TorchDynamoPlugin | None:
    """`dynamo_plugin` for the Accelerator: None, which is what its config file says, or "no"."""
    return None if why_not_compiled(config) is None else TorchDynamoPlugin(backend="no")


def why_not_compiled(config: Config) -> str | None:
    """Why what the accelerate config file asks for does not pay here, or cannot be; else None.

    It follows from the configuration and not from what of the run is left: a run that is stopped
    and goes on must not change its arithmetic.
    """
    if env_var("ACCELERATE_DYNAMO_BACKEND").upper() != "INDUCTOR":  # others are for debugging
        return None
    variable, *names = COMPILERS["cpu" if on_cpu() else "cuda"]
    if not any(shutil.which(name) for name in (env_var(variable), *names) if name):
        return f"there is no compiler ({' or '.join(names)}) on this machine"
    operations = _operations(config)
    if operations < WORTH_COMPILING and not is_on("COMPILE_SHORT_RUNS"):
        return (
            f"this run is {_rounded(operations)} operations for each process, and compiling is won "
            f"back from about {_rounded(WORTH_COMPILING)} on. COMPILE_SHORT_RUNS=1 in the "
            "environment compiles it all the same"
        )
    return None


def _operations(config: Config) -> float:
    """Of the whole run, for each process: six for each weight in a block and each token."""
    model, train = config.model, config.train
    weights = 12 * model.n_layer * model.n_embd**2
    tokens = train.max_steps * train.global_batch_size * config.data.block_size
    return 6.0 * weights * tokens / started_processes()


def _rounded(number: float) -> str:
    """'5e15'."""
    return f"{number:.0e}".replace("e+", "e")
