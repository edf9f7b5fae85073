"""Processes that share each sequence, or each matrix of the model.

What they cannot do is refused with the entry of the accelerate config file.
"""

from __future__ import annotations

from math import gcd

import accelerate

from config.schema import Config, ConfigError
from model.family import LanguageModel
from model.frozen import NF4

TP_SIZE = "parallelism_config_tp_size"


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


def refuse_shared_matrices(config: Config, precision: str) -> None:
    """Raise ConfigError if no processes can share matrices in such a run."""
    model = config.model
    for is_set, named in (
        (precision in ("fp16", "fp8"), f"mixed_precision: {precision}"),
        (model.frozen_dtype == NF4, f"model.frozen_dtype={NF4}"),
        (model.lora_rank is not None, f"model.lora_rank={model.lora_rank}"),
    ):
        if is_set:
            raise ConfigError(
                f"{named} cannot be used where processes share matrices ({TP_SIZE}). Use FSDP "
                "alone."
            )


def refuse_sharing(
    model: LanguageModel, context: int, tensor: int, context_named: str, tensor_named: str
) -> None:
    """Raise ConfigError if so many processes cannot share a model's sequences, or its matrices.

    The names are those of the settings, each with its value.
    """
    family, heads = model.config.family, model.config.n_head
    if context > 1 and not model.can_share_context:
        raise ConfigError(
            f"{context_named}, but several processes cannot share the sequences of {family}, "
            "or not with the sliding_window or output_router_logits of its config.json. Set it to "
            "1."
        )
    own_heads = heads // tensor  # of processes that share matrices, each has some
    if own_heads % context:
        raise ConfigError(
            f"{context_named}, and the number of heads in attention on each process, {own_heads}, "
            f"is no multiple of it. Set it to a divisor of {own_heads}."
        )
    if tensor > 1 and not model.tensor_plan:
        raise ConfigError(
            f"{tensor_named}, but several processes cannot share the matrices of {family}. "
            "Set it to 1: FSDP shards them, and the experts of a mixture as well "
            "(parallelism_config_dp_shard_size)."
        )
    counts = [heads, model.config.n_kv_head or heads]
    if uneven := [count for count in counts if count % tensor]:
        raise ConfigError(
            f"{tensor_named}, but the model has {uneven[0]} heads, of which each process must have "
            f"as many. Set it to a divisor of {gcd(*counts)}."
        )
