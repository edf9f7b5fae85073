"""What processes that share each matrix cannot do: refused with the entry of the config file."""

from __future__ import annotations

from math import gcd

import accelerate

from config.schema import Config, ConfigError
from model.family import LanguageModel
from model.frozen import NF4
from optim.optimizers import TOGETHER, updates_parts
from training.distributed.accelerator import context_size
from training.distributed.environment import requested_precision
from training.distributed.shared_matrices import tensor_size

TP_SIZE = "parallelism_config_tp_size"
FOUR_BITS = (
    f"model.frozen_dtype={NF4}: weights in four bits are packed by rows, and processes that share "
    f"matrices ({TP_SIZE}) also cut them by columns. Use model.frozen_dtype=bf16, or FSDP alone."
)


def refuse_configuration(accelerator: accelerate.Accelerator, config: Config) -> None:
    """Raise ConfigError if processes are to share matrices, and a value does not allow it."""
    if tensor_size(accelerator) == 1:
        return
    if (refusal := why_not_shared(config, requested_precision())) is not None:
        raise ConfigError(refusal)


def why_not_shared(config: Config, precision: str) -> str | None:
    """Why no processes can share matrices in such a run; None if they can."""
    optim = config.optim
    if precision in ("fp16", "fp8"):
        return (
            f"mixed_precision: {precision} is not supported where processes share matrices "
            f"({TP_SIZE}). Set mixed_precision: bf16 or no."
        )
    if config.model.frozen_dtype == NF4:
        return FOUR_BITS
    if optim.name not in TOGETHER and not updates_parts(optim.name, optim):
        return (
            f"optim.name={optim.name} computes the update of a matrix from all of it, and where "
            f"processes share matrices ({TP_SIZE}) each has a part. Use optim.name=adamw."
        )
    return None


def refuse_model(accelerator: accelerate.Accelerator, model: LanguageModel, config: Config) -> None:
    """Raise ConfigError if processes are to share the model's matrices, and cannot."""
    if (size := tensor_size(accelerator)) > 1:
        if model.layout().packed():  # also if the run began so
            raise ConfigError(FOUR_BITS)
        named = f"The accelerate config file says {TP_SIZE}: {size}"
        refuse_size(named, size, context_size(accelerator), model, config.data.block_size)


def refuse_size(named: str, size: int, sequences: int, model: LanguageModel, length: int) -> None:
    """Raise ConfigError if `size` processes, which is `named` so, cannot share a model's matrices.

    As many groups of them as `sequences` share each sequence, of so many positions.
    """
    heads = model.config.head_counts
    if not model.tensor_plan:
        raise ConfigError(
            f"{named}, but several processes cannot share the matrices of {model.config.family}. "
            "Set it to 1: FSDP shards them, and the experts of a mixture as well "
            "(parallelism_config_dp_shard_size)."
        )
    if uneven := [count for count in heads if count % size]:
        raise ConfigError(
            f"{named}, but the model has {uneven[0]} heads, of which each process must have as "
            f"many. Set it to a divisor of {gcd(*heads)}."
        )
    multiple = sequences * size
    if model.shares_positions and length % multiple:
        below = length // multiple * multiple
        raise ConfigError(
            f"{named}: between layers each process has some of the {length} positions of a "
            f"sequence, so data.block_size must be a multiple of {multiple}. Use "
            f"{f'{below} or ' * (below > 0)}{below + multiple}."
        )
