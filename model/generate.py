"""Text generation: one token at a time, with a key-value cache.

Letters in shapes: B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from model.causal_lm import LanguageModel


class BrokenModel(ValueError):
    """A model whose logits are not finite. The message is a sentence."""


def next_token_probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Probabilities (..., V) from logits (..., V), after temperature, then top-k, then top-p.

    `temperature` 0 gives the largest logit (the first of equal ones) probability 1. `top_k` keeps
    the k most likely tokens; `top_p` the smallest set of most likely tokens whose probabilities sum
    to p (nucleus sampling, Holtzman et al., 2020), at least one.
    """
    assert temperature >= 0
    assert top_k is None or top_k >= 1
    assert top_p is None or 0 < top_p <= 1
    logits = logits.float()
    if temperature < 1e-30:  # a division by it would overflow float32
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.size(-1)).float()
    # Shift the largest to 0: a tiny temperature then makes the others -inf, but not all of them.
    probabilities = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_k is None and top_p is None:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[..., top_k:] = 0.0
    if top_p is not None:
        ordered /= ordered.sum(-1, keepdim=True)
        before = ordered.cumsum(-1) - ordered  # the sum of the more likely ones
        ordered[before >= top_p] = 0.0
    filtered = torch.zeros_like(ordered).scatter(-1, order, ordered)
    return filtered / filtered.sum(-1, keepdim=True)


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Tensor,
    new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    vocab_size: int | None = None,
) -> Iterator[Tensor]:
    """Yield `new_tokens` tokens (B,) that follow the prompt (B, T >= 1), as they are sampled.

    Sampling depends on `seed` alone and does not use the global generator. Up to `block_size`
    positions the cache is used, and each token costs a forward pass of one position. Later the
    window slides: the model sees the last `block_size` tokens. Learned positions shift with the
    window, so each token then costs a forward pass of a full window.

    With `vocab_size` only tokens below it are drawn: an embedding may have more rows than the
    tokenizer has tokens. Under FSDP every process must call this, with the same arguments. The
    model runs without dropout, and its training mode is restored.

    Raises BrokenModel if logits are not finite.
    """
    assert prompt.size(1) > 0, "the prompt needs at least one token"
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same text on every device
    block_size = model.config.block_size
    was_training = model.training
    model.eval()
    try:
        text = prompt[:, -block_size:]
        cache: Any = model.new_cache()
        logits = model(text, cache=cache)[:, -1]  # (B, V)
        for drawn in range(new_tokens):
            if not logits.isfinite().all():
                raise BrokenModel(
                    f"the model's logits are not finite after {drawn} tokens: its weights are not "
                    "finite, or far too large. Use another snapshot."
                )
            logits = logits[:, :vocab_size]
            probabilities = next_token_probabilities(logits, temperature, top_k, top_p)
            token = torch.multinomial(probabilities.cpu(), 1, generator=generator).to(text.device)
            yield token[:, 0]
            if drawn + 1 == new_tokens:
                return
            if text.size(1) < block_size:
                text = torch.cat((text, token), dim=1)
                logits = model(token, cache=cache)[:, -1]
            else:
                text = torch.cat((text[:, 1:], token), dim=1)
                logits = model(text)[:, -1]
    finally:
        model.train(was_training)
