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


def refuse_context(named: str, size: int, matrices: int, model: LanguageModel) -> None:
    """Raise ConfigError if `size` processes, which is `named` so, cannot share each sequence.

    Each of them may be several that share `matrices`, and so have some of the heads.
    """
    if not model.can_share_context:
        raise ConfigError(
            f"{named}, but several processes cannot share the sequences of {model.config.family}, "
            "or not with the sliding_window or output_router_logits of its config.json. Set it to "
            "1."
        )
    heads = model.config.n_head // matrices
    if heads % size:
        raise ConfigError(
            f"{named}, and the number of heads in attention on each process, {heads}, is no "
            f"multiple of it. Set it to a divisor of {heads}."
        )


def why_not_shared(config: Config, precision: str) -> str | None:
    """Why no processes can share matrices in such a run; None if they can."""
    model, refused = config.model, None
    if precision in ("fp16", "fp8"):
        refused = f"mixed_precision: {precision}"
    elif model.frozen_dtype == NF4:
        refused = f"model.frozen_dtype={NF4}"
    elif model.lora_rank is not None:
        refused = f"model.lora_rank={model.lora_rank}"
    if refused is None:
        return None
    return f"{refused} cannot be used where processes share matrices ({TP_SIZE}). Use FSDP alone."


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
