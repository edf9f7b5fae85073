"""prove.py: from the command line to a table, proof.json and an exit code."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from common.command import say_error
from common.printable import redact_urls
from config.compose import load_config
from config.removed import removed_option
from config.schema import Config, ConfigError
from config.stored import as_plain
from proving.checks import GREEN, GREY, RED, RUNS, Line, lines_of_proof
from proving.launch import Launch
from snapshot.disk.folder import write_whole
from snapshot.disk.state import versions
from training.distributed.launcher import is_main_process, launched
from training.exits import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_MISTAKE
from training.reporting.console import make_output_lossy

PROOF = "proof.json"
NAMES, STATUS = 32, 7
"""Widths of the columns."""
WIDEST = 110


def prove(main: Callable[..., int]) -> NoReturn:
    """Prove the run of the command line, whose loop is `main`; the exit code is 1 if one is red."""
    make_output_lossy()
    options, words = parse(sys.argv[1:])
    try:
        config = load_config(words)
        folder = folder_of(config)
    except ConfigError as error:
        if is_main_process():
            say_error(f"error: {error}")
        leave(EXIT_USER_MISTAKE)
    launch = Launch(main, words, folder)
    if not is_main_process():
        launch.follow()
        leave(EXIT_DONE)
    try:
        code = as_main(options, config, launch)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    finally:
        launch.remove(*RUNS)
        launch.end()
    leave(code)


def as_main(options: argparse.Namespace, config: Config, launch: Launch) -> int:
    """What the main process does, to the exit code."""
    launch.remove(*RUNS)
    launch.folder.mkdir(parents=True, exist_ok=True)
    begun, lines, count = time.monotonic(), [], launch.processes
    print(f"proof     {config.run.name} on {count} process{'es' * (count > 1)}; it does not touch")
    print(f"          {config.run.dir}, and writes to {launch.folder}\n", flush=True)
    for line in lines_of_proof(launch, config):
        lines.append(line)
        print(in_columns(line), flush=True)
        if line.status == RED and options.stop_at_red:
            break
    counts = {status: sum(line.status == status for line in lines) for status in (GREEN, RED, GREY)}
    summary = ", ".join(f"{number} {status}" for status, number in counts.items())
    print(f"\n{summary}, in {time.monotonic() - begun:.0f} s\nrecord    {launch.folder / PROOF}")
    content = {
        "words": [redact_urls(word) for word in launch.words],
        "processes": count,
        "config": as_plain(config),
        "versions": versions(),
        "counts": counts,
        "checks": [asdict(line) for line in lines],
    }
    write_whole(launch.folder / PROOF, json.dumps(content, indent=2).encode() + b"\n")
    return EXIT_FAILED if counts[RED] else EXIT_DONE


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of prove.py, and the words of train.py."""
    parser = argparse.ArgumentParser(
        prog="prove.py",
        description="Check a run before it costs money. Further words are those of train.py.",
    )
    parser.add_argument("--stop-at-red", action="store_true", help="end with the first red line")
    options, words = parser.parse_known_args(list(arguments))
    if sentence := removed_option("prove.py", words):
        parser.error(sentence)
    for word in words:
        if word.startswith("-"):
            parser.error(f"there is no option {word}")
    return options, words


def folder_of(config: Config) -> Path:
    """The folder of the proof, next to the run's. Raises ConfigError if it holds anything else."""
    folder = Path(f"{config.run.dir}-proof")
    if folder.exists() and any(folder.iterdir()) and not any(folder.glob("*.log")):
        raise ConfigError(
            f"the proof would be written to {folder}, which holds other files. Name another "
            "run.dir, or move them away."
        )
    return folder


def in_columns(line: Line) -> str:
    """A line for the terminal, wrapped in its columns."""
    head = f"{line.status:<{STATUS}}{line.name:<{NAMES}}"
    width = max(min(shutil.get_terminal_size().columns, WIDEST), len(head) + 20)
    return textwrap.fill(line.said, width, initial_indent=head, subsequent_indent=" " * len(head))


def leave(code: int) -> NoReturn:
    """End the process; with a launcher at once, as train.py does."""
    sys.stdout.flush()
    sys.stderr.flush()
    if launched():
        os._exit(code)
    sys.exit(code)
