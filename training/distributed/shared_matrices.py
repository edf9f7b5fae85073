"""Processes that share each matrix of the model: how many, and how they clip gradients."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from torch import Tensor, nn

from model.sharded import gather_full, local_part


def tensor_size(accelerator: accelerate.Accelerator) -> int:
    """The number of processes that share each matrix (`parallelism_config_tp_size`)."""
    sizes = accelerator.parallelism_config
    return 1 if sizes is None else int(sizes.tp_size)


def clip_shared(parameters: list[Any], max_norm: float, norm_type: float) -> Tensor:
    """Clip gradients of parameters that processes share (`Cut`); returns their norm before that."""
    from torch.distributed import all_gather_single

    parts: list[Tensor] = []
    wholes: list[Tensor] = []
    for one in parameters:
        if one.grad is not None:
            (wholes if one.cut.dim is None else parts).append(one.grad)
    group, device = parameters[0].cut.group, parameters[0].device
    own, of_wholes = (
        gather_full(nn.utils.get_total_norm(some, norm_type)).to(device) for some in (parts, wholes)
    )
    norms = own.new_empty(group.size())
    all_gather_single(norms, own[None], group=group)
    norm = torch.linalg.vector_norm(torch.cat((norms, of_wholes[None])), norm_type)
    smaller = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
    for gradient in parts + wholes:
        local_part(gradient).mul_(smaller)
    return norm
