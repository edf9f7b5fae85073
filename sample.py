"""Generate text from a run or any other model, and print it while it is generated; or talk with it.

python sample.py out/python-docs --prompt "The "
python sample.py out/chat --chat
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from io import TextIOWrapper
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray

from common.command import exit_code_of
from common.printable import printable
from data.chat import ChatTemplate
from data.errors import DataError
from data.messages import ChatError, Conversation, Message
from data.tokenizer import Tokenizer
from data.tokenizer_files import end_ids
from model.family import LanguageModel
from model.generate import generate
from snapshot.command_line import POSITIVE_INT, USER_ERRORS, bounded, model_parser, usable_device
from snapshot.named_model import find_model

UNDECODED = "has bytes that this locale does not decode: set PYTHONUTF8=1"


def main(arguments: list[str]) -> int:
    """Print samples; return the exit code: 2 for a user error."""
    options = parse(arguments)

    def print_texts() -> None:
        for text in (chat if options.chat else generate_texts)(options):
            show(text)

    return exit_code_of(print_texts, *USER_ERRORS)


def generate_texts(options: argparse.Namespace) -> Iterator[str]:
    """Yield the output, each character as soon as it is generated.

    The model reads what its tokenizer puts before a text, as in transformers. A text ends where the
    model generates an end-of-text token.
    """
    device = usable_device(options.device)
    named = find_model(options.model, options.base)
    tokenizer = named.tokenizer()
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
    named = find_model(options.model, options.base)
    tokenizer = named.tokenizer()
    template = ChatTemplate(tokenizer, named.name)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    model = named.load().to(device)
    context = model.config.block_size
    room_for_reply = min(options.length, (context - 1) // 2)
    stops = template.stops().union(end_ids(named.folder))
    messages: list[Message] = []
    for question in questions():
        if not question:
            messages.clear()
            continue
        asked = [*messages, {"role": "user", "content": question}]
        try:
            ids = template.encode_prompt(Conversation([*system, *asked]))
            while len(asked) > 1 and len(ids) > context - 1 - room_for_reply:
                del asked[:2]
                ids = template.encode_prompt(Conversation([*system, *asked]))
            if len(ids) >= context:
                raise ChatError(f"it has {len(ids):,} tokens, and the context has {context:,}")
        except ChatError as error:
            yield f"(Not answered: {error}.)\n"
            continue
        if len(asked) <= len(messages):
            yield "(The context is full: the oldest questions are forgotten.)\n"
        reply = ""
        for text in continued(model, tokenizer, ids, stops, options, options.seed + len(asked)):
            reply += text
            yield text
        messages = [*asked, {"role": "assistant", "content": reply}]
        yield "\n"


def questions() -> Iterator[str]:
    """The lines of the standard input, without spaces around them."""
    prompt = "> " if sys.stdin is not None and sys.stdin.isatty() else ""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")
    with suppress(EOFError, RuntimeError):  # RuntimeError: there is no standard input
        while True:
            try:
                yield input(prompt).strip()
            except UnicodeDecodeError as error:
                raise DataError(f"A question {UNDECODED}") from error


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


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with 2 and a usage line for a mistake."""
    parser = model_parser("Generate text from a model, printed while it is generated.")
    add = parser.add_argument
    add("--prompt", type=decoded, help="the beginning of the text; default: a newline")
    add("--no-bos", action="store_true", help="leave out the tokenizer's token before a prompt")
    add("--chat", action="store_true", help="reply to each line of the input")
    add("--system", type=decoded, help="with --chat, the system message")
    add("--length", type=POSITIVE_INT, default=500, help="tokens to add; with --chat at most")
    add("--samples", type=POSITIVE_INT, default=1, help="how many texts")
    add("--temperature", type=bounded(float, 0, 1e6), default=0.8, help="0: the likeliest token")
    add("--top-k", type=POSITIVE_INT, help="sample only from the k most likely tokens")
    add("--top-p", type=bounded(float, 1e-6, 1), help="and those that sum to this probability")
    add("--seed", type=bounded(int, 0, 2**63 - 1), default=1337, help="equal seeds, equal texts")
    options = parser.parse_args(arguments)
    if options.chat and (options.prompt is not None or options.samples != 1):
        parser.error("--chat reads its questions from the input: leave out --prompt and --samples")
    if options.system is not None and not options.chat:
        parser.error("--system is for --chat: add --chat")
    return options


def decoded(text: str) -> str:
    """An argument that has no bytes of another encoding."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise argparse.ArgumentTypeError(UNDECODED)
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
