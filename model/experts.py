"""Expert parallelism: several processes share the experts of a mixture.

All of them have the same tokens and choose the same experts for them. A process has an Nth of the
experts, computes what these make of the tokens that chose them, and adds up the results with the
others. So nothing is sent but that sum. If N does not divide the number of experts, a process has
an Nth of the channels of each.

Letters in shapes: S tokens, C channels, K experts of a token, N processes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

CHANNELS = {"gate_up_proj": (1, 2), "up_proj": (1, 1), "down_proj": (2, 1)}
"""The weights of all experts, (experts, outputs, inputs): the dimension of the channels in between,
and how many matrices are joined along it."""
LAID_OUT = {
    "is_transposed": False,
    "is_concatenated": True,
    "has_bias": False,
    "has_post_expert_norm": False,
}
"""What transformers says of such experts."""


def can_share(module: Any) -> bool:
    """Whether these are experts of transformers that `share_experts` knows."""
    names = {name for name, _ in module.named_parameters()}
    if not names <= CHANNELS.keys() or not hasattr(module, "num_experts"):
        return False
    if module.config._experts_implementation == "eager":
        # One after the other, without those that no token chose: a process whose experts nobody
        # chose would not meet the others in its backward pass.
        return False
    return all(getattr(module, name, None) is value for name, value in LAID_OUT.items())


def share_experts(group: Any, module: Any, _: int) -> None:
    """Keep this process's experts, or its channels of each.

    `group` is the `model.tensor.TensorGroup` of the processes.
    """
    count, compute = module.num_experts, module.forward
    whole = count % group.size == 0
    for name, one in module.named_parameters():
        dim, joined = (0, 1) if whole else CHANNELS[name]
        group.take(one, dim, joined)
    if whole:
        # transformers leaves out tokens of the expert after the last one.
        module.num_experts, module._is_expert_parallel = count // group.size, True
    first, own = group.rank * module.num_experts, module.num_experts

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens (S, C), their experts (S, K) and the shares of these (S, K) to (S, C)."""
        # The router is whole: it needs the gradients of the shares of all experts. What is added
        # up has three dimensions, as other layers' outputs have.
        shares = group.sum_backward(top_k_weights[None])[0]
        hidden, dtype = group.enter(hidden_states[None])[0], hidden_states.dtype
        if whole:
            top_k_index = top_k_index - first
            others = (top_k_index < 0) | (top_k_index >= own)
            top_k_index = top_k_index.masked_fill(others, own)
            shares = shares.masked_fill(others, 0.0)
        return group.leave(compute(hidden, top_k_index, shares)[None])[0].to(dtype)

    module.forward = forward
