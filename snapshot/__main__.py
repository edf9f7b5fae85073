"""Inspect and convert snapshots without training.

python -m snapshot list NAME      list the snapshots, newest first
python -m snapshot verify NAME    verify all snapshots of a folder, or the newest of a store:
                                  hashes, headers, contents, and the logits of the newest, which
                                  transformers must compute as well
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
from pathlib import Path

from browser.space import make_space
from common.command import exit_code_of
from common.printable import printable
from config.removed import removed_option
from snapshot.command_line import USER_ERRORS
from snapshot.comparison import OtherModel, compare_logits
from snapshot.config_values import value_of
from snapshot.disk.checking import check_snapshot
from snapshot.disk.folder import atomic_folder, manifest_entries
from snapshot.disk.model import model_of
from snapshot.disk.state import loss_in_words, read_state
from snapshot.errors import SnapshotError
from snapshot.named_model import BASE_HELP, find_model, write_model
from snapshot.source import find
from snapshot.status import print_status
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


def _warn(text: str) -> int:
    """Print untrusted text on stderr."""
    print(printable(text, multiline=True), file=sys.stderr)
    return NOT_WHOLE


def _merge(options: argparse.Namespace) -> int:
    """Write a model to a new folder, which transformers loads and `model.pretrained` takes."""
    named, folder = find_model(options.source, options.base), options.folder
    if named.adapters is None:
        raise SnapshotError(f"{named.name} is whole already: transformers loads it as it is.")
    if os.path.lexists(folder):
        raise SnapshotError(f"{folder} exists. Name a new folder.")
    with atomic_folder(folder.parent, folder.name) as building:
        write_model(named, building)
    _show(f"merged    {named.name} and its base, in float32: {folder}")
    return 0


def _space(options: argparse.Namespace) -> int:
    make_space(options.source, options.to)
    _show(f"space     {options.to}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Verify all snapshots of a folder, or download and verify the newest of a store."""
    source, whole, faults = find(options.source), list[tuple[Path, str]](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            if source.contents is not None:
                found = source.fetch(Path(folder))
                whole, faults = [(found.path, found.name)], [*found.faults]
        except NoneWhole as error:
            faults.append(str(error))
        for path in source.folders():
            try:
                check_snapshot(path)
                whole.append((path, str(path)))
            except SnapshotError as error:
                faults.append(str(error))
        is_same = not whole or _describe(*whole[0])
    for _, place in whole[1:]:
        _show(f"also whole: {place}")
    for fault in faults:
        _warn(f"not whole: {fault}")
    return 0 if is_same and not faults else NOT_WHOLE


def _describe(folder: Path, place: str) -> bool:
    """Print what a whole snapshot at a `place` is; whether transformers computes the same."""
    state, entries = read_state(folder), manifest_entries(folder)
    size = sum(size for size, _ in entries.values())
    loss = "nothing held out was evaluated before it"
    if (best := state.best_loss) is not None:
        loss = f"{loss_in_words(state.data, best)}, the best that was held out before it"
    _show(f"snapshot  {place}: whole, {len(entries)} files, {size:,} bytes, every hash right")
    _show(
        f"run       {value_of(state.config, 'run.name')}, {state.run_id[:8]}, step {state.step:,}"
    )
    _show(f"loss      {loss}")
    try:
        _show(f"logits    {compare_logits(folder, model_of(folder)[0])}")
    except OtherModel as error:
        _warn(f"error: {str(error).replace(str(folder), place)}.")
        return False
    return True


def _list(options: argparse.Namespace) -> int:
    """Print a line for each snapshot of a source; the exit code."""
    source = find(options.source)
    rows: list[tuple[int, int, str]] = []
    if (contents := source.contents) is not None:
        for folder in contents.folders():
            size = sum(contents.files[p].size for p in contents.files if p.startswith(f"{folder}/"))
            rows.append((remote_step(folder), size, f"{contents.name} {folder}"))
    for path in source.folders():
        try:
            sizes = [size for size, _ in manifest_entries(path).values()]
            rows.append((read_state(path).step, sum(sizes), str(path)))
        except SnapshotError as error:
            _show(f"{path.name}  {error}")
    for step, size, where in rows:
        _show(f"step {step:>10,}  {size:>15,} bytes  {where}")
    if contents is not None and contents.latest is not None:
        _show(f"newest: step {contents.latest.step}, run {contents.latest.run_id[:8]}")
    if rows:
        return 0
    lack = f"{source.name} holds no snapshot that can be read. Name a run's folder."
    return _warn(f"not whole: {lack if contents is None else NoneWhole(contents, ())}")


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "verify": _verify,
    "status": lambda options: print_status(options.source),
    "merge": _merge,
    "space": _space,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
