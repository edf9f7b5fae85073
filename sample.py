"""Generate text from a run or any other model, and print it while it is generated; or talk with it.

python sample.py out/python-docs --prompt "The "
python sample.py out/chat --chat
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.printable import printable
from config.checks import why_not_storable
from data.chat import ChatTemplate
from data.errors import DataError
from data.messages import ChatError, Conversation, Message, objects
from data.subwords import tokenizer_of
from data.tokenizer import Tokenizer, refuse_larger_than
from data.tokenizer_files import end_ids
from model.family import LanguageModel
from model.generate import generate
from snapshot.command_line import (
    default_device,
    exit_code_of,
    positive_int,
    usable_device,
    whole_number,
)
from snapshot.named_model import BASE_HELP, NamedModel, find_model

SMALLEST = 1e-30
"""Smaller temperatures count as 0, because a division by them overflows float32."""


def main(arguments: list[str]) -> int:
    """Print samples; return the exit code: 2 for a user error."""
    options = parse(arguments)

    def print_texts() -> None:
        for text in (chat if options.chat else generate_texts)(options):
            show(text)

    return exit_code_of(print_texts)


def generate_texts(options: argparse.Namespace) -> Iterator[str]:
    """Yield the output, each character as soon as it is generated.

    The model reads what its tokenizer puts before a text, as in transformers. A text ends where the
    model generates an end-of-text token.
    """
    device = usable_device(options.device)
    named, tokenizer = find(options)
    beginning = tokenizer.beginning if options.prompt is None else options.prompt
    ids = tokenizer.encode(beginning)
    if not len(ids):
        raise DataError(f"--prompt {beginning!r} has no tokens in this tokenizer. Use another.")
    if not options.no_bos:
        ids = np.array([*tokenizer.before_text, *ids])
    model = named.load().to(device)
    end = tokenizer.end_of_text
    stops = frozenset([*end_ids(named.folder), *([] if end is None else [end])])
    for number in range(options.samples):
        if number:
            yield "-" * 40 + "\n"
        yield beginning
        yield from continued(model, tokenizer, ids, stops, options, options.seed + number)
        yield "\n"


def chat(options: argparse.Namespace) -> Iterator[str]:
    """Yield replies to the lines of the standard input, which may be a person at a terminal.

    An empty line begins a new conversation. Where one becomes longer than the context, its oldest
    questions are forgotten.
    """
    device = usable_device(options.device)
    named, tokenizer = find(options)
    template = ChatTemplate(tokenizer, named.name)
    model = named.load().to(device)
    longest = model.config.block_size - 1
    longest_with_others = longest - min(options.length, longest // 2)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    begin = Conversation(system, {} if options.tools is None else {"tools": options.tools})
    if template.unwritten(begin):
        what = f"--tools: the chat template of {named.name} never writes tools"
        raise DataError(f"{what}. Leave it out.")
    messages: list[Message] = []
    stops = template.stops(begin).union(end_ids(named.folder))
    if sys.stdin is not None:
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    while (question := ask()) is not None:
        if not question:
            messages.clear()
            continue
        used = [*messages, {"role": "user", "content": question}]
        try:
            ids = template.encode_prompt(begin.and_then(used))
            while len(used) > 1 and len(ids) > longest_with_others:
                del used[:2]
                ids = template.encode_prompt(begin.and_then(used))
            if len(ids) > longest:
                raise ChatError(f"it has {len(ids):,} tokens, and the context has {longest + 1:,}")
        except ChatError as error:
            yield f"(Not answered: {error}.)\n"
            continue
        forgotten = (len(messages) + 1 - len(used)) // 2
        messages = used
        if forgotten:
            lost = "question is" if forgotten == 1 else f"{forgotten} questions are"
            yield f"(The context is full: the oldest {lost} forgotten.)\n"
        reply = ""
        seed = options.seed + len(messages)
        for text in continued(model, tokenizer, ids, stops, options, seed):
            reply += text
            yield text
        messages.append({"role": "assistant", "content": reply})
        yield "\n"


def ask() -> str | None:
    """The next line without spaces around it; None at the end."""
    on_terminal = sys.stdin is not None and sys.stdin.isatty()
    try:
        return input("> " if on_terminal else "").strip()
    except (EOFError, RuntimeError):  # RuntimeError: there is no standard input
        return None


def continued(
    model: LanguageModel,
    tokenizer: Tokenizer,
    ids: NDArray,
    stops: frozenset[int],
    options: argparse.Namespace,
    seed: int,
) -> Iterator[str]:
    """Yield the text that follows token `ids` (T,), up to one of `stops`."""
    device = next(model.parameters()).device
    tokens = generate(
        model,
        torch.from_numpy(ids.astype("int64"))[None].to(device),
        options.length,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=seed,
        vocab_size=tokenizer.vocab_size,
    )
    new = takewhile(lambda token: token not in stops, map(int, tokens))
    yield from tokenizer.decode_stream(new, after=ids.tolist())


def show(text: str) -> None:
    """Print at once: unchanged to a pipe or a file, with escapes to a terminal."""
    if sys.stdout is not None and sys.stdout.isatty():
        text = printable(text, multiline=True)
    print(text, end="", flush=True)


def find(options: argparse.Namespace) -> tuple[NamedModel, Tokenizer]:
    """The model that is named, and its tokenizer.

    Raises SnapshotError, StoreError and DataError.
    """
    named = find_model(options.model, options.base)
    tokenizer = tokenizer_of(named.folder)
    refuse_larger_than(named.sizes.vocab_size, tokenizer, str(named.folder))
    return named, tokenizer


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with 2 and a usage line for a mistake."""
    parser = argparse.ArgumentParser(
        description="Generate text from a run or any other model, printed while it is generated."
    )
    parser.add_argument(
        "model",
        help="the folder of a run, a snapshot or any model, owner/name[@revision] or a URL",
    )
    parser.add_argument(
        "--prompt", type=_some_text, help="the beginning of the text; default a newline"
    )
    parser.add_argument(
        "--no-bos",
        action="store_true",
        help="leave out the token that the tokenizer of some models puts before a prompt",
    )
    _add_chat_options(parser)
    parser.add_argument(
        "--length",
        type=positive_int,
        default=500,
        help="how many tokens to add, with --chat at most; a token is a character unless the model "
        "has subwords",
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
        type=_probability,
        help="sample only from the most likely tokens whose probabilities sum to p",
    )
    parser.add_argument(
        "--seed", type=_seed, default=1337, help="the same seed gives the same text"
    )
    parser.add_argument("--base", help=BASE_HELP)
    parser.add_argument("--device", default=default_device())
    options = parser.parse_args(arguments)
    if options.chat and (options.prompt is not None or options.samples != 1):
        parser.error("--chat reads its questions from the input: leave out --prompt and --samples")
    for name in ("system", "tools"):
        if getattr(options, name) is not None and not options.chat:
            parser.error(f"--{name} is for --chat: add --chat")
    return options


def _add_chat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chat", action="store_true", help="reply to each line of the input, as a chat model does"
    )
    parser.add_argument("--system", type=_some_text, help="with --chat, the system message")
    parser.add_argument(
        "--tools",
        type=_tools,
        metavar="FILE",
        help="with --chat, a JSON file with a list of the tools that the model may call",
    )


def _some_text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("needs at least one character")
    if (reason := why_not_storable(text)) is not None:
        raise argparse.ArgumentTypeError(reason)
    return text


def _tools(path: str) -> list[Any]:
    try:
        return objects("it", json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # BadRow is one
        raise argparse.ArgumentTypeError(
            f"{path} has no tools: {error}. Write a JSON list of objects, each a JSON schema"
        ) from error


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
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least 0")
    return value if value >= SMALLEST else 0.0


def _probability(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
