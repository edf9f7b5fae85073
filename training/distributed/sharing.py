"""Processes that share each sequence, or each matrix of the model.

What they cannot do is refused with the entry of the accelerate config file.
"""

from __future__ import annotations

from math import gcd

import accelerate

from config.schema import Config, ConfigError, RunConfig
from model.family import LanguageModel
from model.frozen import NF4

TP_SIZE = "parallelism_config_tp_size"
FOUR_BITS = (
    f"model.frozen_dtype={NF4}: weights in four bits are packed by rows, and processes that share "
    f"matrices ({TP_SIZE}) also cut them by columns. Use model.frozen_dtype=bf16, or FSDP alone."
)


def data_parallel_size(accelerator: accelerate.Accelerator) -> int:
    """The number of parts of a global batch.

    Processes that share a sequence, or matrices, have the same part.
    """
    return accelerator.num_processes // (context_size(accelerator) * tensor_size(accelerator))


def context_size(accelerator: accelerate.Accelerator) -> int:
    """The number of processes that share each sequence (`parallelism_config_cp_size`)."""
    sizes = accelerator.parallelism_config
    return 1 if sizes is None else int(sizes.cp_size)


def tensor_size(accelerator: accelerate.Accelerator) -> int:
    """The number of processes that share each matrix (`parallelism_config_tp_size`)."""
    sizes = accelerator.parallelism_config
    return 1 if sizes is None else int(sizes.tp_size)


def refuse_context(
    named: str, size: int, matrices: int, model: LanguageModel, run: RunConfig
) -> None:
    """Raise ConfigError if `size` processes, which is `named` so, cannot share each sequence.

    Each of them may be several that share `matrices`, and so have some of the heads.
    """
    if run.attention != "auto":
        raise ConfigError(
            f"{named}, and where processes share each sequence run.attention={run.attention} has "
            "no effect. Leave one of them out."
        )
    if not model.can_share_context:
        raise ConfigError(
            f"{named}, but several processes cannot share the attention of {model.config.family}. "
            "Set it to 1."
        )
    heads = model.config.n_head // matrices
    if heads % size:
        each = f" of each of {matrices} processes that share matrices" if matrices > 1 else ""
        raise ConfigError(
            f"{named}, and the number of heads in attention{each}, {heads}, is no multiple of it. "
            f"Set it to a divisor of {heads}."
        )


def why_not_shared(config: Config, precision: str) -> str | None:
    """Why no processes can share matrices in such a run; None if they can."""
    if precision in ("fp16", "fp8"):
        return (
            f"mixed_precision: {precision} is not supported where processes share matrices "
            f"({TP_SIZE}). Set mixed_precision: bf16 or no."
        )
    if config.model.frozen_dtype == NF4:
        return FOUR_BITS
    if config.model.lora_rank is not None:
        return (
            f"model.lora_rank={config.model.lora_rank}: adapters are small, and processes that "
            f"share matrices ({TP_SIZE}) do not share them. Use FSDP alone."
        )
    return None


def refuse_model(accelerator: accelerate.Accelerator, model: LanguageModel, config: Config) -> None:
    """Raise ConfigError if processes are to share sequences or the model's matrices, and cannot."""
    tensor, context = tensor_size(accelerator), context_size(accelerator)
    file = "The accelerate config file says"
    if context > 1:
        named = f"{file} parallelism_config_cp_size: {context}"
        refuse_context(named, context, tensor, model, config.run)
    if tensor > 1:
        if model.layout().packed():  # also if the run began so
            raise ConfigError(FOUR_BITS)
        named = f"{file} {TP_SIZE}: {tensor}"
        refuse_size(named, tensor, model)


def refuse_size(named: str, size: int, model: LanguageModel) -> None:
    """Raise ConfigError if `size` processes, which is `named` so, cannot share its matrices."""
    heads = [model.config.n_head, model.config.n_kv_head or model.config.n_head]
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
