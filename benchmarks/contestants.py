"""A training loop of benchmarks/throughput.py or scaling.py, in a separate process.

It reads numbers of steps from standard input, one a line, runs them, and prints their seconds as a
line of JSON after "@ ". In between it is idle, so that several loops can take turns on one machine.
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
from harness import LEARNING_RATE

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16}
MATRIX = 2048 if DEVICE.type == "cpu" else 8192
BETAS, DECAY = (0.9, 0.99), 0.1
ACTIVATION = "gelu"  # as in our small presets and nanoGPT


def wait_for_device() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def send(**figures: Any) -> None:
    print("@ " + json.dumps(figures), flush=True)


def memory() -> float:
    """Peak MB of tensors on a GPU; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 1e6 if DEVICE.type == "cuda" else 0.0


def serve(step: Callable[[], Any], **facts: Any) -> None:
    """Run the requested steps until the input ends."""
    send(**facts)
    for line in sys.stdin:
        started_at = time.perf_counter()
        for _ in range(int(line)):
            result = step()
        wait_for_device()
        send(seconds=time.perf_counter() - started_at, loss=result, memory=memory())


def ours(words: list[str]) -> None:
    """train.py, paused at the beginning of steps; started by `accelerate launch`."""
    from accelerate.utils import broadcast_object_list

    import train
    from model.family import parameter_count
    from training.distributed.launcher import is_main_process
    from training.run.command import run_command

    reseed, build = train.reseed, train.build_empty
    is_main = is_main_process()
    steps_left, started_at = 0, 0.0

    def build_with_report(config: Any) -> Any:
        model = build(config)
        if is_main:
            send(parameters=parameter_count(model))
        return model

    def request() -> int:
        """The next number of steps, on all processes: the main process reads and broadcasts it."""
        line = [sys.stdin.readline()] if is_main else [None]
        (line,) = broadcast_object_list(line)
        if not line:
            os._exit(0)
        return int(line)

    def paused_reseed(seed: int, step: int, process: int) -> None:
        nonlocal steps_left, started_at
        if step > 0:
            if steps_left == 0:
                wait_for_device()
                if started_at and is_main:
                    seconds = time.perf_counter() - started_at
                    send(seconds=seconds, memory=memory())
                steps_left, started_at = request(), time.perf_counter()
            steps_left -= 1
        reseed(seed, step, process)

    train.reseed, train.build_empty = paused_reseed, build_with_report
    sys.argv = ["train.py", *words]
    run_command(train.main)


def tokens_of(settings: dict[str, Any]) -> Any:
    """The training text of train.py as a tensor, and the size of its vocabulary."""
    from config.schema import DataConfig
    from data.corpus import prepare_corpus
    from data.tokenizer import CHARACTERS

    keys = {"source": settings["source"], "block_size": settings["block_size"]}
    corpus = prepare_corpus(
        DataConfig(**keys, cache_dir=settings["cache"]),
        Path(settings["tokenizer"]) if "tokenizer" in settings else CHARACTERS,
    )
    tokens = corpus.train.window(0, len(corpus.train)).astype("int64")
    return torch.from_numpy(tokens), corpus.tokenizer.vocab_size


def shape_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Of a model, in the words that our GPTConfig and nanoGPT's have in common."""
    sizes = {k: settings[k] for k in ("block_size", "n_layer", "n_head", "n_embd")}
    return {**sizes, "dropout": settings.get("dropout", 0.0)}


def random_batches(tokens: torch.Tensor, settings: dict[str, Any]) -> Callable[[], Any]:
    """Random windows (batch, block_size), as in the simplest training loops."""
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


def compiled(model: torch.nn.Module, settings: dict[str, Any]) -> Any:
    """The model, compiled where the settings ask for it."""
    backend = settings.get("backend", "inductor")
    return torch.compile(model, backend=backend) if settings["compile"] else model


def bare(settings: dict[str, Any]) -> None:
    """The same model and text in a minimal loop of plain torch with gradient clipping."""
    from model.family import parameter_count
    from model.gpt import GPT, GPTConfig
    from training.step import compute_reproducibly

    torch.manual_seed(0)
    tokens, vocabulary = tokens_of(settings)
    config = GPTConfig(vocabulary, **shape_of(settings), activation_function=ACTIVATION)
    model = GPT(config).to(DEVICE)
    if settings.get("deterministic"):
        compute_reproducibly()
    parameters = parameter_count(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, BETAS, weight_decay=DECAY, fused=True
    )
    next_batch = random_batches(tokens, settings)
    called = compiled(model, settings)

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
    """nanoGPT's model and optimizer from a checkout, with the operations of its train.py."""
    spec = importlib.util.spec_from_file_location("other", Path(settings["path"]) / "model.py")
    assert spec is not None
    assert spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    torch.manual_seed(0)
    tokens, vocabulary = tokens_of(settings)
    model = other.GPT(other.GPTConfig(vocab_size=vocabulary, bias=True, **shape_of(settings)))
    model.to(DEVICE)
    optimizer = model.configure_optimizers(DECAY, LEARNING_RATE, BETAS, DEVICE.type)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    next_batch = random_batches(tokens, settings)
    called = compiled(model, settings)
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
    """The limit of the machine: repeated matrix products in that precision."""
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
