"""What a run looks at between two steps: the held-out loss, and a text that the model generates."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn

from data.corpus import Corpus
from model.generate import BrokenModel, generate
from model.head import summed_loss
from training.distributed.accelerator import is_compiled, unwrapped
from training.exits import TrainingStopped

TOKENS, MOST_SECONDS = 400, 20.0


def held_out_loss(
    accelerator: Accelerator, model: nn.Module, batches: Iterable[tuple[Sequence[Tensor], float]]
) -> float:
    """Mean loss in nats over all targets in `batches` of all processes; every process calls this.

    The model computes the loss as in training, so it needs no more memory. Sums and counts are
    reduced in float64 and divided once, so uneven shares have the right weight. Dropout is off.
    """
    model.eval()
    total = summed_loss(model, batches, accelerator.device)
    model.train()
    loss_sum, count = accelerator.reduce(total, "sum").tolist()
    return loss_sum / count


def sample_text(accelerator: Accelerator, model: nn.Module, corpus: Corpus, seed: int) -> str:
    """Generate a short text, the same on every process. Every process must call this.

    It ends at an end-of-text token of the tokenizer or of the model's own files, after `TOKENS`
    tokens, or after `MOST_SECONDS`. A chat model replies to the first held-out question. Raises
    TrainingStopped if the weights are not finite.
    """
    tokenizer, marks = corpus.tokenizer, corpus.marks
    stops, deadline = {*marks, *corpus.ends, tokenizer.end_of_text}, time.monotonic() + MOST_SECONDS
    bare_model = unwrapped(accelerator, model)
    beginning = corpus.prompt().astype("int64")
    prompt = torch.from_numpy(beginning)[None].to(accelerator.device)
    # FSDP compiles blocks, and would again for each layer's cache.
    eager = torch.compiler.set_stance("force_eager") if is_compiled(accelerator) else nullcontext()
    with eager:
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
            for token in map(int, drawn):
                if token in stops:
                    break
                tokens.append(token)
                late = torch.tensor([int(time.monotonic() > deadline)], device=accelerator.device)
                if broadcast(late):  # by the main process's clock
                    break
        except BrokenModel as error:
            raise TrainingStopped(str(error)) from error
    return tokenizer.decode(tokens)
