"""Inspect and convert snapshots without training.

python -m snapshot list NAME      list the snapshots, newest first
python -m snapshot verify NAME    verify all snapshots of a folder, or the newest of a store:
                                  hashes, headers and contents
python -m snapshot status NAME    say how far the run in a store is, and which attempt on which
                                  machine has uploaded that, and when
python -m snapshot merge NAME FOLDER
                                  write a whole model: adapters (LoRA), added to their base
python -m snapshot space NAME --to FOLDER
                                  make a Gradio Space: a page that continues texts, or a chat

NAME is a folder, owner/name[@revision] of the Hub, or a URL.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from browser.space import make_space
from common.command import exit_code_of
from common.printable import printable
from config.removed import removed_option
from snapshot.command_line import USER_ERRORS
from snapshot.config_values import value_of
from snapshot.disk.checking import check_snapshot
from snapshot.disk.folder import atomic_folder, manifest_entries
from snapshot.disk.state import read_state
from snapshot.errors import SnapshotError
from snapshot.named_model import BASE_HELP, find_model
from snapshot.source import find
from store.fetch import NoneWhole
from store.latest import remote_step

NOT_WHOLE = 1
"""The exit code for a snapshot that is not whole."""


def main(arguments: list[str]) -> int:
    """Run the command; the exit code: 1 for a snapshot that is not whole, 2 for a user error."""
    options = parse(arguments)
    return exit_code_of(lambda: COMMANDS[options.command](options), *USER_ERRORS)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with 2 and a usage line for a mistake."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m snapshot", description=__doc__, formatter_class=as_written
    )
    if sentence := removed_option("python -m snapshot", arguments[:1]):
        parser.error(sentence)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in COMMANDS:
        command = commands.add_parser(name)
        command.add_argument("source", metavar="NAME")
        if name == "merge":
            command.add_argument("folder", type=Path, help="the new folder of the whole model")
            command.add_argument("--base", help=BASE_HELP)
        if name == "space":
            command.add_argument("--to", required=True, help="the new folder of the page")
    return parser.parse_args(arguments)


def _show(text: str) -> None:
    """Print a line of untrusted text."""
    print(printable(text))


def _merge(options: argparse.Namespace) -> int:
    """Write a model to a new folder, which transformers loads and `model.pretrained` takes."""
    named, folder = find_model(options.source, options.base), options.folder
    if named.adapters is None:
        raise SnapshotError(f"{named.name} is whole already: transformers loads it as it is.")
    if os.path.lexists(folder):
        raise SnapshotError(f"{folder} exists. Name a new folder.")
    with atomic_folder(folder.parent, folder.name) as building:
        named.write(building)
    _show(f"merged    {named.name} and its base, in float32: {folder}")
    return 0


def _space(options: argparse.Namespace) -> int:
    make_space(options.source, options.to)
    _show(f"space     {options.to}")
    return 0


def _list(options: argparse.Namespace, verifies: bool = False) -> int:
    """Print a line for each snapshot of a source, and what is wrong with the others; the exit code.

    To verify, all snapshots of a folder are hashed, or the newest of a store is downloaded.
    """
    source, faults = find(options.source), list[str]()
    contents, folders = source.contents, [(path, str(path)) for path in source.folders()]
    with tempfile.TemporaryDirectory() as target:
        if contents is not None and verifies:
            try:
                found = source.fetch(Path(target))
                folders, faults = [(found.path, found.name)], [*found.faults]
            except NoneWhole as error:
                faults.append(str(error))
        elif contents is not None:
            for place in contents.folders():
                sizes = [
                    contents.files[p].size for p in contents.files if p.startswith(f"{place}/")
                ]
                _show_snapshot(remote_step(place), sum(sizes), f"{contents.name} {place}")
            if not contents.folders():
                faults.append(str(NoneWhole(contents, ())))
        for path, name in folders:
            try:
                if verifies and path.parent != Path(target):
                    check_snapshot(path)
                state, entries = read_state(path), manifest_entries(path)
            except SnapshotError as error:
                faults.append(str(error))
                continue
            more = ""
            if verifies:
                run = f"run {value_of(state.config, 'run.name')}, {state.run_id[:8]}"
                more = f": whole, {len(entries)} files, every hash right; {run}"
            _show_snapshot(state.step, sum(size for size, _ in entries.values()), f"{name}{more}")
    for fault in faults:
        print(printable(f"not whole: {fault}", multiline=True), file=sys.stderr)
    return NOT_WHOLE if faults else 0


def _show_snapshot(step: int, size: int, where: str) -> None:
    _show(f"step {step:>10,}  {size:>15,} bytes  {where}")


def _status(options: argparse.Namespace) -> int:
    """Print which attempt on which machine has uploaded the newest snapshot of a store, and when.

    Raises SnapshotError and StoreError where that is unknown.
    """
    if (contents := find(options.source).contents) is None:
        raise SnapshotError(
            f"{options.source} is a folder, and status is that of a store. The newest line of "
            "metrics.jsonl and exit_code say how far a run is here."
        )
    if refusal := contents.refusal():
        raise SnapshotError(refusal)
    if (latest := contents.latest) is None:
        raise SnapshotError(f"{contents.store.name} holds no run. Check the name.")
    _show(f"run       {latest.run_id[:8]} in {contents.name}")
    _show(f"attempt   {latest.attempt_id[:8]}, generation {latest.generation}")
    _show(f"machine   {latest.machine or 'unknown'}")
    _show(f"step      {latest.step:,} is the newest there")
    _show(f"uploaded  {latest.time}, by the clock of that machine")
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "verify": partial(_list, verifies=True),
    "status": _status,
    "merge": _merge,
    "space": _space,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
