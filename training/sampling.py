"""Text that the model generates during training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn

from data.corpus import Corpus
from model.causal_lm import LanguageModel
from model.generate import BrokenModel, generate
from model.gpt import parameter_count
from model.sharded import reshard
from training.distributed.strategy import is_compiled, unwrapped
from training.exits import TrainingStopped
from training.memory import memory_left

TOKENS, MOST_SECONDS = 400, 20.0
TOGETHER = 16
"""After so many tokens several processes compare whether the time is up."""


class Sample(NamedTuple):
    """A text that the model has generated."""

    text: str
    shortened: str = ""
    """Where the time ended it: how much there is of it, in words."""


def sample_text(accelerator: Accelerator, model: nn.Module, corpus: Corpus, seed: int) -> Sample:
    """Generate a short text, the same on every process. Every process must call this.

    It ends with the text that the model writes, at any end of the tokenizer or of the model's own
    files; a reply to the first held-out question with the model's turn; and any after
    `MOST_SECONDS`. Raises TrainingStopped where the weights are not finite.
    """
    tokenizer, marks = corpus.tokenizer, corpus.marks
    stops, deadline = {*marks, *corpus.ends, tokenizer.end_of_text}, time.monotonic() + MOST_SECONDS
    bare_model = unwrapped(accelerator, model)
    beginning = corpus.prompt().astype("int64")
    prompt = torch.from_numpy(beginning)[None].to(accelerator.device)
    with _unsharded_blocks(accelerator, bare_model), _uncompiled(accelerator):
        drawn = generate(
            bare_model,
            prompt,
            TOKENS,
            temperature=0.8,
            top_k=200,
            seed=seed,
            vocab_size=tokenizer.vocab_size,
        )
        tokens: list[int] = beginning.tolist() if marks else []
        try:
            for number, token in enumerate(map(int, drawn), start=1):
                if token in stops:
                    break
                tokens.append(token)
                if number < TOKENS and _is_late(accelerator, number, deadline):
                    return Sample(
                        tokenizer.decode(tokens),
                        f"{number} of {TOKENS} {tokenizer.unit}s, for it took {MOST_SECONDS:g} s",
                    )
        except BrokenModel as error:
            raise TrainingStopped(str(error)) from error
    return Sample(tokenizer.decode(tokens))


def _is_late(accelerator: Accelerator, number: int, deadline: float) -> bool:
    """Whether the main process's time is up. Every process must call this."""
    if accelerator.num_processes > 1 and number % TOGETHER:
        return False
    late = torch.tensor([int(time.monotonic() > deadline)], device=accelerator.device)
    return bool(broadcast(late))


def _uncompiled(accelerator: Accelerator) -> contextlib.AbstractContextManager[object]:
    """FSDP compiles blocks in place; each layer's cache would compile them again."""
    if not is_compiled(accelerator):
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def _unsharded_blocks(accelerator: Accelerator, model: LanguageModel) -> Iterator[None]:
    """Have FSDP gather each block once and not once a character, where memory is sufficient."""
    if not accelerator.is_fsdp2 or not accelerator.state.fsdp_plugin.reshard_after_forward:
        yield
        return
    width = 4 if accelerator.mixed_precision == "no" else 2
    free = torch.tensor([memory_left(accelerator.device)], device=accelerator.device)
    if 2 * width * parameter_count(model) > accelerator.gather(free).min():
        yield
        return
    _reshard_blocks_after_forward(model, False)
    try:
        yield
    finally:
        _reshard_blocks_after_forward(model, True)
        reshard(model)


def _reshard_blocks_after_forward(model: LanguageModel, value: bool) -> None:
    for block in model.blocks:
        block.set_reshard_after_forward(value)  # type: ignore[operator]
