"""Tensor parallelism: several processes share the matrices of a model's blocks.

Every parameter becomes a DTensor on the mesh of these processes, and a layer computes with its
local part (Shoeybi et al., 2019). A process has some heads of attention and some channels of the
MLP: the first matrices of a layer are sharded by their outputs, the last one by its inputs, and
what that returns is a part of a sum. Embeddings, norms and the output layer are replicated; each
process computes the loss of some positions (`model.head.Head`).

A plan has transformers' words (`base_model_tp_plan`), for our models as for theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from model.frozen import compute_dtype

Plan = Mapping[str, str]
"""By the name of a module, in which * stands for the number of a layer, one of `WAYS`."""
COLUMNS, ROWS = "colwise", "rowwise"
OF_HEADS = "replicated_with_grad_allreduce"
"""A norm of each head, whose gradient is the sum over the heads of all processes."""
WAYS = (COLUMNS, ROWS, OF_HEADS)
REPLICATED = "embedding_rowwise"
"""What transformers says of an embedding, which is replicated here."""
PARTS = ".parts."
"""What the names of a `Joined` layer's matrices have after its own."""


class Joined(nn.Module):
    """A linear layer whose matrices, which its weight joins by rows, are layers of their own.

    A process has the rows of its heads in each. In one weight they would lie apart, and no DTensor
    does.
    """

    def __init__(self, layer: nn.Linear, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Linear(1, 1, layer.bias is not None, device="meta") for _ in range(count)
        )
        for name, one in layer.named_parameters():
            for part, rows in zip(self.parts, one.detach().chunk(count), strict=True):
                setattr(part, name, nn.Parameter(rows, one.requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (..., N) to the outputs (..., M) of all matrices."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


def share_matrices(model: nn.Module, plan: Plan, joined: Mapping[str, int], mesh: Any) -> None:
    """Make each parameter a DTensor of a mesh with one dimension.

    `joined` names the layers that become `Joined`, and their counts of matrices. Call this before
    the model is wrapped, and before an optimizer gets its parameters.
    """
    from torch.distributed.tensor import Replicate, Shard

    for name, module in [*model.named_modules()]:
        count = joined.get(name.rpartition(".")[2], 1)
        if count > 1 and isinstance(module, nn.Linear):
            model.set_submodule(name, Joined(module, count))
    replaced: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter stays one
    for name, module in model.named_modules():
        layer = name.partition(PARTS)[0]
        way = plan.get(".".join("*" if part.isdecimal() else part for part in layer.split(".")))
        for key, one in module._parameters.items():
            if one is not None:
                lies = Shard(0) if way == COLUMNS else Replicate()
                if way == ROWS and key == "weight":
                    lies = Shard(1)
                if one not in replaced:
                    replaced[one] = _shard(one, mesh, lies)
                module._parameters[key] = replaced[one]
        if module._parameters:
            _compute_locally(module, mesh, way)
        if way == COLUMNS and layer == name:  # once for all matrices of a joined layer
            _sum_gradient_of_input(module, mesh)


def _shard(parameter: nn.Parameter, mesh: Any, placement: Any) -> nn.Parameter:
    """A DTensor in place of a parameter, with this process's part of its values."""
    from torch.distributed.tensor import DTensor

    local = parameter.detach()
    if placement.is_shard():  # a copy, so that the memory of the rest is freed
        local = local.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].clone()
    options: Any = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    whole = DTensor.from_local(local, mesh, [placement], **options)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _compute_locally(module: Any, mesh: Any, way: str | None) -> None:
    """Have a layer compute with this process's part of its parameters."""
    from torch.distributed.tensor import Partial, Replicate

    compute = module.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        parameters = {key: one for key, one in module._parameters.items() if one is not None}
        local = {key: one.to_local() for key, one in parameters.items()}
        if way == OF_HEADS:
            local = {key: summed_gradient(one, mesh) for key, one in local.items()}
        # A bias is added to the sum, and not to each of its parts.
        bias = local.pop("bias", None) if way == ROWS else None
        module._parameters.update({**dict.fromkeys(parameters), **local})
        try:
            output = compute(*inputs, **named)
        finally:  # FSDP and autograd know the DTensors
            module._parameters.update(parameters)
        if way == ROWS:
            output = moved(output, mesh, Partial(), Replicate())
        return output if bias is None else output + bias.to(output.dtype)

    module.forward = forward


def _sum_gradient_of_input(module: Any, mesh: Any) -> None:
    """Add up the gradients of a layer's input: each process has that of its own outputs."""
    compute = module.forward
    module.forward = lambda x: compute(summed_gradient(x.to(compute_dtype(x)), mesh))


def summed_gradient(x: Tensor, mesh: Any) -> Tensor:
    """x as it is; its gradient is the sum of those of all processes."""
    from torch.distributed.tensor import Partial, Replicate

    return moved(x, mesh, Replicate(), Replicate(), Partial())


def moved(x: Tensor, mesh: Any, lies: Any, then: Any, gradient: Any = None) -> Tensor:
    """x, which lies on the mesh as one placement says, as another one says.

    So does its gradient, unless that comes as a third one says. Every process of the mesh must call
    this, and compute its backward pass.
    """
    from torch.distributed.tensor import DTensor

    whole = DTensor.from_local(x, mesh, [lies], run_check=False).redistribute(placements=[then])
    return whole.to_local(grad_placements=None if gradient is None else [gradient])
