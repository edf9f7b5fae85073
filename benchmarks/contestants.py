"""One contestant of benchmarks/throughput.py or scaling.py, in a process of its own.

Reads how many steps to take from its standard input, a number a line; answers with a line of JSON
behind "@ ": their seconds. Between two numbers it waits and computes nothing, so that contestants
can take turns on one machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16}
MATRIX = 2048 if DEVICE.type == "cpu" else 8192
LEARNING_RATE, BETAS, DECAY = 1e-3, (0.9, 0.99), 0.1
ACTIVATION = "gelu"  # of our smaller presets, and of nanoGPT


def wait_for_device() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def tell(**figures: Any) -> None:
    print("@ " + json.dumps(figures), flush=True)


def memory() -> float:
    """MB of tensors at the peak, on a GPU."""
    return torch.cuda.max_memory_allocated() / 1e6 if DEVICE.type == "cuda" else 0.0


def serve(step: Callable[[], Any], **facts: Any) -> None:
    """Take the steps that are asked for, until the input ends."""
    tell(**facts)
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(int(line)):
            result = step()
        wait_for_device()
        tell(seconds=time.perf_counter() - begun, loss=result, memory=memory())


def ours(words: list[str]) -> None:
    """train.py as it is, held at the beginning of a step; started by `accelerate launch`."""
    from accelerate.utils import broadcast_object_list

    import train
    from model.gpt import parameter_count
    from training.distributed.environment import is_main_process
    from training.run.command import run_command

    reseed, gpt = train.reseed, train.GPT
    speaks = is_main_process()
    left, begun = 0, 0.0

    def counted(config: Any) -> Any:
        model = gpt(config)
        if speaks:
            tell(parameters=parameter_count(model))
        return model

    def asked() -> int:
        """How many steps come next, on all processes: those that were not told wait here."""
        line = [sys.stdin.readline()] if speaks else [None]
        (line,) = broadcast_object_list(line)
        if not line:
            os._exit(0)
        return int(line)

    def held(seed: int, step: int, process: int) -> None:
        nonlocal left, begun
        if step > 0:
            if left == 0:
                wait_for_device()
                if begun and speaks:
                    tell(seconds=time.perf_counter() - begun, memory=memory())
                left, begun = asked(), time.perf_counter()
            left -= 1
        reseed(seed, step, process)

    train.reseed, train.GPT = held, counted
    sys.argv = ["train.py", *words]
    run_command(train.main)


def tokens_of(settings: dict[str, Any]) -> Any:
    """The training text of our loop, in memory, and the size of its vocabulary."""
    from data.corpus import prepare_corpus

    corpus = prepare_corpus(
        settings["source"],
        text_column="text",
        val_fraction=0.1,
        block_size=settings["block_size"],
        cache_dir=Path(settings["cache"]),
    )
    tokens = corpus.train.window(0, len(corpus.train)).astype("int64")
    return torch.from_numpy(tokens), corpus.tokenizer.vocab_size


def random_batches(tokens: torch.Tensor, settings: dict[str, Any]) -> Callable[[], Any]:
    """Random windows (batch, block_size), as the simplest of loops take them."""
    batch, block = settings["batch"], settings["block_size"]

    def next_batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(tokens) - block, (batch,))
        inputs = torch.stack([tokens[i : i + block] for i in starts])
        targets = torch.stack([tokens[i + 1 : i + 1 + block] for i in starts])
        if DEVICE.type == "cuda":
            return (
                inputs.pin_memory().to(DEVICE, non_blocking=True),
                targets.pin_memory().to(DEVICE, non_blocking=True),
            )
        return inputs, targets

    return next_batch


def autocast(precision: str) -> Any:
    if precision == "no":
        return nullcontext()
    return torch.autocast(DEVICE.type, PRECISIONS[precision])


def bare(settings: dict[str, Any]) -> None:
    """The same model and text in the shortest loop of plain torch that clips its gradient."""
    from model.gpt import GPT, GPTConfig, parameter_count

    torch.manual_seed(0)
    tokens, vocabulary = tokens_of(settings)
    shape = {k: settings[k] for k in ("block_size", "n_layer", "n_head", "n_embd")}
    model = GPT(GPTConfig(vocabulary, **shape, activation_function=ACTIVATION)).to(DEVICE)
    parameters = parameter_count(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, BETAS, weight_decay=DECAY, fused=True
    )
    next_batch = random_batches(tokens, settings)
    called = torch.compile(model) if settings["compile"] else model

    def step() -> None:
        inputs, targets = next_batch()
        with autocast(settings["precision"]):
            loss = called(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    serve(step, parameters=parameters)


def nanogpt(settings: dict[str, Any]) -> None:
    """nanoGPT's model and optimizer from a checkout, in the order of its train.py's step."""
    spec = importlib.util.spec_from_file_location("other", Path(settings["path"]) / "model.py")
    assert spec is not None
    assert spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    torch.manual_seed(0)
    tokens, vocabulary = tokens_of(settings)
    shape = {k: settings[k] for k in ("block_size", "n_layer", "n_head", "n_embd")}
    model = other.GPT(other.GPTConfig(vocab_size=vocabulary, dropout=0.0, bias=False, **shape))
    model.to(DEVICE)
    optimizer = model.configure_optimizers(DECAY, LEARNING_RATE, BETAS, DEVICE.type)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    next_batch = random_batches(tokens, settings)
    called = torch.compile(model) if settings["compile"] else model
    inputs, targets = next_batch()

    def step() -> None:
        nonlocal inputs, targets
        with autocast(settings["precision"]):
            _, loss = called(inputs, targets)
        inputs, targets = next_batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    serve(step, parameters=parameters)


def product(settings: dict[str, Any]) -> None:
    """The machine's limit: a matrix product of that precision, again and again."""
    kind = PRECISIONS[settings["precision"]]
    a, b = (torch.randn(MATRIX, MATRIX, device=DEVICE).to(kind) for _ in range(2))
    out = torch.empty_like(a)
    serve(lambda: torch.mm(a, b, out=out) is None, flops=2 * MATRIX**3)


if __name__ == "__main__":
    kind, *words = sys.argv[1:]
    if kind == "ours":
        ours(words)
    else:
        {"bare": bare, "nanogpt": nanogpt, "product": product}[kind](json.loads(words[0]))
