"""Generate text from a run or a snapshot, and print it while it is generated.

python sample.py out/python-docs --prompt "The "
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import torch

from data.errors import DataError
from data.printable import printable
from data.subwords import load_tokenizer
from model.causal_lm import build_model
from model.device import default_device, usable_device
from model.generate import generate
from snapshot.command_line import exit_code_of, positive_int, whole_number
from snapshot.disk.architecture import model_config
from snapshot.disk.files import read_json
from snapshot.disk.state import restore_weights
from snapshot.errors import SnapshotError
from snapshot.hub.client import Hub
from snapshot.hub.fetch import newest_for_sampling
from snapshot.hub.names import NAMED_BUCKET, named_repo
from snapshot.resume import newest_snapshot

SMALLEST = 1e-30
"""Smaller temperatures count as 0, because a division by them overflows float32."""


def main(arguments: list[str]) -> int:
    """Print samples; return the exit code: 2 for a user error."""
    options = parse(arguments)

    def print_texts() -> None:
        for text in generate_texts(options):
            show(text)

    return exit_code_of(print_texts)


def generate_texts(options: argparse.Namespace) -> Iterator[str]:
    """Yield the output, each character as soon as it is generated.

    A text ends where the model generates the end-of-text token, if its tokenizer has one.
    """
    folder = snapshot_folder(options.snapshot)
    tokenizer = load_tokenizer(folder)
    beginning = tokenizer.beginning if options.prompt is None else options.prompt
    ids = tokenizer.encode(beginning)
    if not len(ids):
        raise DataError(f"--prompt {beginning!r} has no tokens: the tokenizer leaves it out.")
    device = usable_device(options.device)
    path = folder / "config.json"
    model = build_model(model_config(read_json(path), str(path)))
    restore_weights(folder, model)
    model.to(device)
    prompt = torch.from_numpy(ids.astype("int64"))[None].to(device)
    for number in range(options.samples):
        if number:
            yield "-" * 40 + "\n"
        yield beginning
        tokens = generate(
            model,
            prompt,
            options.length,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed + number,
            vocab_size=tokenizer.vocab_size,
        )
        new = takewhile(lambda token: token != tokenizer.end_of_text, map(int, tokens))
        yield from tokenizer.decode_stream(new, after=ids.tolist())
        yield "\n"


def show(text: str) -> None:
    """Print at once: unchanged to a pipe or a file, with escapes to a terminal."""
    if sys.stdout is not None and sys.stdout.isatty():
        text = printable(text, multiline=True)
    print(text, end="", flush=True)


def snapshot_folder(snapshot: str) -> Path:
    """The folder of a snapshot, from a path or a Hub repo (owner/name or owner/name@revision)."""
    if NAMED_BUCKET.fullmatch(snapshot):
        raise SnapshotError(
            f"{snapshot} is a bucket, and samples come from a folder or a repo. Train with "
            "hub.repo_id as well, which has the last snapshot of a run that is done."
        )
    repo = named_repo(snapshot)
    if repo is None:
        return newest_snapshot(Path(snapshot))
    name, revision = repo
    return newest_for_sampling(Hub(name), revision)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with 2 and a usage line for a mistake."""
    parser = argparse.ArgumentParser(
        description="Generate text from a run or a snapshot, printed while it is generated."
    )
    parser.add_argument(
        "snapshot",
        help="a run's folder, a snapshot's, or a repo of the Hub: owner/name[@revision]",
    )
    parser.add_argument(
        "--prompt", type=_some_text, help="the beginning of the text; default a newline"
    )
    parser.add_argument(
        "--length",
        type=positive_int,
        default=500,
        help="how many tokens to add; a token is a character unless the model has subwords",
    )
    parser.add_argument("--samples", type=positive_int, default=1, help="how many texts")
    parser.add_argument(
        "--temperature",
        type=_at_least_zero,
        default=0.8,
        help="below 1 more likely, above 1 more varied, 0 always the most likely token",
    )
    parser.add_argument(
        "--top-k", type=positive_int, help="sample only from the k most likely tokens"
    )
    parser.add_argument(
        "--top-p",
        type=_share,
        help="sample only from the most likely tokens whose probabilities sum to p",
    )
    parser.add_argument(
        "--seed", type=_seed, default=1337, help="the same seed gives the same text"
    )
    parser.add_argument("--device", default=default_device())
    return parser.parse_args(arguments)


def _some_text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("needs at least one character")
    return text


def _seed(text: str) -> int:
    return whole_number(text, 0, 2**63 - 1)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None


def _at_least_zero(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 up")
    return value if value >= SMALLEST else 0.0


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
