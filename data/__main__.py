"""Look at a data set before training on it.

python -m data inspect SOURCE    list files, rows, columns, first rows, tokens and epochs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from data.command import EXIT_FAILED, EXIT_USER_MISTAKE, exit_code_of, say_error
from data.errors import DataError, TextUnreachable
from data.inspection import inspect
from data.printable import printable
from data.tokenizer import OF_BYTES

COMMANDS = ("inspect",)
ARGUMENTS = {"data.text_column": "--text-column", "data.source": "SOURCE"}
"""The arguments for keys that messages name."""


def main(arguments: list[str]) -> int:
    """Print what a source holds; the exit code: 1 if it cannot be reached, 2 for a user error."""
    options = parse(arguments)
    return exit_code_of(lambda: _inspect(options))


def _inspect(options: argparse.Namespace) -> int:
    run = (options.max_steps, options.global_batch_size, options.block_size)
    try:
        for line in inspect(
            options.source,
            options.text_column,
            options.tokenizer,
            run,
            options.cache_dir,
            lambda line: print(printable(line), file=sys.stderr),
        ):
            print(printable(line), flush=True)
    except DataError as error:
        message = str(error)
        for key, argument in ARGUMENTS.items():
            message = message.replace(f"{key}=", f"{argument}=")
        say_error(message)
        return EXIT_FAILED if isinstance(error, TextUnreachable) else EXIT_USER_MISTAKE
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with 2 and a usage line for a mistake."""
    parser = argparse.ArgumentParser(prog="python -m data", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("source", metavar="SOURCE", help="as data.source with data.streaming=true")
    parser.add_argument("--text-column", default="text", help="data.text_column (default: text)")
    parser.add_argument(
        "--tokenizer", help=f"a folder with a tokenizer; default {OF_BYTES}, whose tokens are bytes"
    )
    for key, default in (("max-steps", 1200), ("global-batch-size", 12), ("block-size", 64)):
        parser.add_argument(f"--{key}", type=int, default=default, help=f"default: {default}")
    parser.add_argument(
        "--cache-dir", type=Path, default=Path("out/data"), help="data.cache_dir (out/data)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
