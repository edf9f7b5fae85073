"""Print the loss of a run, a snapshot or any causal language model over a text.

python evaluate.py out/python-docs
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common.command import exit_code_of, say_error
from common.printable import printable
from config.schema import Config, DataConfig, is_streamed
from data.columns import CONVERSATIONS, DOCUMENT_MODES, PACKED
from data.corpus import Corpus
from data.errors import DataError
from data.loader import HeldOutBatches, window_loader, windows_of
from data.prepared import ALL_HELD_OUT
from data.reading.access import Access
from data.reading.formats import suffixes
from data.tokenizer import refuse_larger_than
from model.family import parameter_count
from model.generate import BrokenModel
from model.head import IGNORED, summed_loss
from snapshot.command_line import (
    POSITIVE_INT,
    USER_ERRORS,
    DeviceError,
    model_parser,
    on_terminal,
    usable_device,
)
from snapshot.named_model import NamedModel, find_model
from training.run.stored_text import open_stored_text, stored_config
from training.run.text import open_text, revisions_of

LARGEST_CACHE_BYTES = 10**15
"""Nothing is removed from the cache for a few held-out rows."""
LONGEST_BLOCK = 1024
"""The default context for a model that no run of this project has trained."""
LARGEST_LOSS = 700
"""Nats per token. The perplexity of a larger loss, its exponential, overflows."""
ADDRESS = re.compile(r"(?!hf:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
"""A URL, except one of the Hub."""


def main(arguments: list[str]) -> int:
    """Print the figures; return the exit code: 2 for a user error."""
    options = parse(arguments)
    return exit_code_of(lambda: show(evaluate(options), options.json), *USER_ERRORS)


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the model over the text, by name: the content of `--json`."""
    device = usable_device(options.device)
    named = find_model(options.model, options.base)
    run = stored_config(named)
    block_size = block_size_for(named, run, options)
    corpus = text_for(named, run, options, block_size)
    most = None  # windows
    if options.batches is not None:
        most = options.batches * options.batch_size
    elif run is not None and not is_whole(options):
        train = run.train
        most = train.eval_batches and train.eval_batches * train.global_batch_size
    model = named.load().to(device).eval()
    windows = windows_of(corpus.held_out, block_size, IGNORED, model.config.can_pack)
    batch_size = min(options.batch_size, len(windows.in_order(most)))
    loader = window_loader(windows, HeldOutBatches(windows, most, batch_size))
    shown = tqdm(loader, desc="evaluating", unit="batch", leave=False, disable=None)
    begun = time.perf_counter()
    try:
        batches = (([part.to(device) for part in batch], share) for batch, share in shown)
        loss_sum, count = summed_loss(model, batches, device).tolist()
    except torch.OutOfMemoryError as error:
        too_large = f"--batch-size={batch_size} needs more memory than {device} has"
        raise DeviceError(f"{too_large}. Use a smaller one, or --block-size.") from error
    seconds = time.perf_counter() - begun
    loss = loss_sum / count
    if not loss < LARGEST_LOSS:
        what = f"the loss is {loss} nats per token: the weights are broken"
        raise BrokenModel(f"{what}. Evaluate another snapshot.")
    return {
        "model": named.name,
        "parameters": parameter_count(model),
        "step": None if named.state is None else named.state.step,
        "text": corpus.info.name,
        "fingerprint": corpus.info.fingerprint,
        "held_out": not is_whole(options),
        "loss": loss,
        "bits_per_byte": corpus.info.bits_per_byte(loss),
        "lost": corpus.info.lost_in_words,
        "perplexity": math.exp(loss),
        "unit": corpus.tokenizer.unit,
        "tokens": int(count),
        "tokens_of_text": windows.target_count,
        "block_size": block_size,
        "batch_size": batch_size,
        "tokens_per_second": count / seconds,
        "device": str(device),
    }


def block_size_for(named: NamedModel, run: Config | None, options: argparse.Namespace) -> int:
    """Tokens of a window. Raises DataError for more than the model's context."""
    longest = named.sizes.block_size
    default = LONGEST_BLOCK if run is None else run.data.block_size
    block_size: int = options.block_size or min(default, longest)
    if block_size > longest:
        what = f"--block-size={block_size} is longer than the context of {named.name}"
        raise DataError(f"{what}. Use at most {longest}.")
    has_own_chats = run is not None and run.data.documents == CONVERSATIONS
    if has_own_chats and not is_whole(options) and block_size != default:
        what = f"--block-size={block_size} is not the run's data.block_size={default}"
        raise DataError(f"{what}, to which its conversations were shortened. Leave it out.")
    return block_size


def is_whole(options: argparse.Namespace) -> bool:
    """Whether all of a text is evaluated, and not the part that the run holds out."""
    return options.source is not None and not options.held_out


def text_for(
    named: NamedModel, run: Config | None, options: argparse.Namespace, block_size: int
) -> Corpus:
    """The text, in tokens of the model's own tokenizer: all of another one, or the run's.

    Raises DataError for a text that cannot be used, or that should be the run's and is not.
    """
    if run is None and not is_whole(options):
        named_by = "" if options.source is None else ", without --held-out"
        what = f"{options.model} is not a run of this project, so it has no text of its own"
        raise DataError(f"{what}. Name a text with --source{named_by}.")
    access = Access(Path(options.cache_dir), say_error if on_terminal() else None)
    if run is None or is_whole(options):
        data = DataConfig(
            source=options.source,
            text_column=options.column or "text",
            val_fraction=ALL_HELD_OUT,
            block_size=block_size,
            documents=options.documents or (PACKED if run is None else run.data.documents),
            cache_dir=options.cache_dir,
        )
        corpus = open_text(data, named.folder, 0, access)
    else:
        corpus = open_stored_text(named, *text_of_run(named, run, options), access)
    refuse_larger_than(named.sizes.vocab_size, corpus.tokenizer, str(named.folder))
    return corpus


def text_of_run(
    named: NamedModel, run: Config, options: argparse.Namespace
) -> tuple[DataConfig, list[str | None]]:
    """The run's own keys `data.*`, with its source where that is now, and a stream's revisions.

    Raises DataError.
    """
    data, parts = run.data, run.data.sources
    revisions = revisions_of(data, named.state)
    if options.source is None:
        for part in parts:
            remedy = f"add --source {part.source} --held-out"
            whole = "download the repo and evaluate its folder"
            refuse_unopened(named, part.source, remedy if len(parts) == 1 else whole)
    elif len(parts) > 1:
        raise DataError(
            f"--source {options.source} is one source, and the run has {len(parts)}. Leave out "
            "--held-out to evaluate all of it, or --source to evaluate the run's own."
        )
    elif options.source != parts[0].source:
        revisions = [None]
        data = replace(data, source=options.source, streaming=is_streamed(data), mix=[])
    cache_dir = options.cache_dir
    return replace(data, cache_dir=cache_dir, stream_cache_bytes=LARGEST_CACHE_BYTES), revisions


def refuse_unopened(named: NamedModel, source: str, remedy: str) -> None:
    """Raise DataError for a run's source that nobody here has named, or that is only a name."""
    if named.place and ADDRESS.match(source):
        what = f"the run's text is {source}. For safety, an address from a store is not opened"
        raise DataError(f"{what}: {remedy}.")
    if "/" not in source and suffixes(source)[0] != "" and not Path(source).exists():
        what = f"the run's text is {source}, and a snapshot does not record its folder"
        raise DataError(f"{what}: add --source <folder>/{source} --held-out.")


def show(figures: dict[str, Any], as_json: bool) -> None:
    """Print the figures as a few lines, or as one object of JSON."""
    if as_json:
        print(json.dumps(figures), flush=True)
        return
    unit, tokens, of = figures["unit"], figures["tokens"], figures["tokens_of_text"]
    step = "" if figures["step"] is None else f"step {figures['step']:,}, "
    held_out = "held-out " if figures["held_out"] else ""
    part = f"all {of:,}" if tokens == of else f"{tokens:,} of {of:,}"
    loss = f"{figures['loss']:.4f} nats per {unit}"
    if figures["bits_per_byte"] is not None:
        loss += f", {figures['bits_per_byte']:.4f} bits per byte"
    perplexity = f"perplexity {figures['perplexity']:,.2f}"
    lines = {
        "model": f"{figures['model']}: {step}{figures['parameters']:,} parameters",
        "text": f"{figures['text']}, {held_out or 'whole '}text in windows of "
        f"{figures['block_size']:,} {unit}s",
        "loss": f"{loss}, {perplexity}, over {part} {held_out}{unit}s",
        "speed": f"{figures['tokens_per_second']:,.0f} tokens/s on {figures['device']}, in float32",
        "lost": figures["lost"],
    }
    for name, line in lines.items():
        if line is not None:
            print(f"{name:<10}{printable(line)}", flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with 2 and a usage line for a mistake."""
    parser = model_parser("Print the loss per token, bits per byte and tokens/s over a text.")
    add = parser.add_argument
    add("--source", help="evaluate all of this text; default: the run's held-out text")
    add("--held-out", action="store_true", help="--source is the run's: evaluate its held-out part")
    add("--column", help="the column of --source with the text, in tables; default: text")
    add("--documents", choices=DOCUMENT_MODES, help="of --source; default: the run's, or packed")
    add("--block-size", type=POSITIVE_INT, help="tokens per window; default: the run's, or 1024")
    add("--batch-size", type=POSITIVE_INT, default=8, help="windows computed at once")
    add("--batches", type=POSITIVE_INT, help="at most this many; default: all, or as in the run")
    add("--cache-dir", default="out/data", help="the cache of prepared texts")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if not is_whole(options) and (options.column or options.documents):
        parser.error("the run's own text has its own --column and --documents: leave them out")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
