"""Processes that share each matrix of the model: how many, what they cannot do, how they clip."""

from __future__ import annotations

from math import gcd
from typing import Any

import accelerate
import torch
from torch import Tensor, nn

from config.schema import Config, ConfigError
from model.family import LanguageModel
from model.sharded import gather_full, local_part
from optim.optimizers import TOGETHER, updates_parts
from training.distributed.environment import requested_precision

TP_SIZE = "parallelism_config_tp_size"


def tensor_size(accelerator: accelerate.Accelerator) -> int:
    """The number of processes that share each matrix (`parallelism_config_tp_size`)."""
    sizes = accelerator.parallelism_config
    return 1 if sizes is None else int(sizes.tp_size)


def why_not_shared(config: Config) -> str | None:
    """Why no processes can share matrices in such a run; None if they can."""
    optim, precision = config.optim, requested_precision()
    if precision in ("fp16", "fp8"):
        return (
            f"mixed_precision: {precision} is not supported where processes share matrices "
            f"({TP_SIZE}). Set mixed_precision: bf16 or no."
        )
    if config.model.lora_rank is not None:
        return (
            f"model.lora_rank={config.model.lora_rank}: adapters are not supported where processes "
            f"share matrices ({TP_SIZE}). Use FSDP alone, or leave it out."
        )
    if optim.name not in TOGETHER and not updates_parts(optim.name, optim):
        return (
            f"optim.name={optim.name} computes the update of a matrix from all of it, and where "
            f"processes share matrices ({TP_SIZE}) each has a part. Use optim.name=adamw."
        )
    return None


def refuse_shared_matrices(
    accelerator: accelerate.Accelerator, model: LanguageModel, config: Config
) -> None:
    """Raise ConfigError if processes are to share the model's matrices, and cannot."""
    if (size := tensor_size(accelerator)) == 1:
        return
    named, heads = f"The accelerate config file says {TP_SIZE}: {size}", model.config.head_counts
    if not model.tensor_plan:
        raise ConfigError(
            f"{named}, but several processes cannot share the matrices of {model.config.family}. "
            "Set it to 1, and shard the model (parallelism_config_dp_shard_size)."
        )
    if uneven := [count for count in heads if count % size]:
        raise ConfigError(
            f"{named}, but the model has {uneven[0]} heads, of which each process must have as "
            f"many. Set it to a divisor of {gcd(*heads)}."
        )
    length, sequences = config.data.block_size, int(accelerator.parallelism_config.cp_size)
    multiple = size * sequences * (2 if sequences > 1 else 1)
    if model.shares_positions and length % multiple:
        below = length // multiple * multiple
        raise ConfigError(
            f"{named}: between layers each process has some of the {length} positions of a "
            f"sequence, so data.block_size must be a multiple of {multiple}. Use "
            f"{f'{below} or ' * (below > 0)}{below + multiple}."
        )


def clip_shared(parameters: list[Any], max_norm: float, norm_type: float) -> Tensor:
    """Clip gradients of parameters that processes share (`Cut`); returns their norm before that."""
    from torch.distributed import all_gather

    parts: list[Tensor] = []
    wholes: list[Tensor] = []
    for one in parameters:
        if one.grad is not None:
            (wholes if one.cut.dim is None else parts).append(one.grad)
    group, device = parameters[0].cut.group, parameters[0].device
    own, of_wholes = (
        gather_full(nn.utils.get_total_norm(some, norm_type)).to(device) for some in (parts, wholes)
    )
    norms = [torch.empty_like(own) for _ in range(group.size())]
    all_gather(norms, own, group=group)
    norm = torch.linalg.vector_norm(torch.stack([*norms, of_wholes]), norm_type)
    smaller = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
    for gradient in parts + wholes:
        local_part(gradient).mul_(smaller)
    return norm
