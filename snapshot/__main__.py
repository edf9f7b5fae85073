"""Inspect and convert snapshots without training.

python -m snapshot list PATH_OR_REPO      list the snapshots, newest first
python -m snapshot verify PATH_OR_REPO    verify all snapshots of a folder, or the newest of a
                                          repo: hashes, headers, contents, and the logits of the
                                          newest, which transformers must compute as well
python -m snapshot merge PATH_OR_REPO FOLDER    write a whole model: adapters (LoRA), added to
                                                the weights of their base
python -m snapshot space PATH_OR_REPO --to FOLDER_OR_SPACE    make a Gradio Space: a page that
                                                              continues texts, or a chat
python -m snapshot status PATH_OR_REPO    say how far a run is, and which attempt on which machine
                                          has uploaded that, and when
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from browser.space import make_space
from common.printable import printable
from common.retries import with_retries
from config.removed import removed_option
from model.family import ModelConfig
from snapshot.command_line import exit_code_of
from snapshot.comparison import OtherModel, compare_logits
from snapshot.config_values import value_of
from snapshot.disk.checking import check_model, check_snapshot, frozen_in
from snapshot.disk.folder import manifest_entries, read_json, snapshot_folders, snapshots_in
from snapshot.disk.model import layout_for, read_adapters
from snapshot.disk.state import RunState, loss_in_words, read_state, token_unit
from snapshot.disk.tensors import kept_in
from snapshot.errors import DiskFault, SnapshotError
from snapshot.named_model import BASE_HELP, merge
from store.fetch import Contents, fetch_newest, read_store
from store.kinds import named_store
from store.latest import remote_step
from store.store import Store

COMMANDS = ("verify", "list", "status", "merge", "space")


def main(arguments: list[str]) -> int:
    """Run the command; the exit code: 1 for a snapshot that is not whole, 2 for a user error."""
    if arguments[:1] == ["status"] and len(arguments) == 2 and not arguments[1].startswith("-"):
        from training.run.status import print_status

        return exit_code_of(lambda: print_status(arguments[1]))
    options = parse(arguments)
    return exit_code_of(lambda: _run(options))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with 2 and a usage line for a mistake."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m snapshot", description=__doc__, formatter_class=as_written
    )
    if sentence := removed_option("python -m snapshot", arguments[:1]):
        parser.error(sentence)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument(
        "source",
        metavar="PATH_OR_REPO",
        help="a folder, owner/name[@revision], or hf://buckets/owner/name",
    )
    parser.add_argument("folder", nargs="?", help="of merge: the new folder of the whole model")
    parser.add_argument("--base", help=f"of merge: {BASE_HELP}")
    parser.add_argument("--to", help="of space: a new folder, or owner/name of a Space of the Hub")
    parser.add_argument(
        "--public", action="store_true", help="of space: everybody may see it on the Hub"
    )
    options = parser.parse_args(arguments)
    if (options.command == "merge") != (options.folder is not None):
        parser.error("merge needs a FOLDER to write; the other commands take none")
    if (options.command == "space") != (options.to is not None):
        parser.error("space needs --to FOLDER_OR_SPACE; the other commands do not take it")
    if options.base is not None and options.command != "merge":
        parser.error("--base applies only to merge")
    if options.public and options.command != "space":
        parser.error("--public applies only to space")
    return options


def _run(options: argparse.Namespace) -> int:
    if options.command == "merge":
        named = merge(options.source, Path(options.folder), options.base)
        _show(f"merged    {named.name} and its base, in float32: {options.folder}")
        return 0
    if options.command == "space":
        _show(f"space     {make_space(options.source, options.to, options.public)}")
        return 0
    return _look(options.command, options.source)


def _look(command: str, source: str) -> int:
    path, remote = Path(source), named_store(source)
    if remote is None and not path.exists():
        raise SnapshotError(f"{source} is neither a folder nor the name of a repo. Check it.")
    try:
        if command == "verify":
            return _verify(path) if remote is None else _verify_remote(*remote)
        if remote is None:
            _list(path)
        else:
            _list_remote(*remote)
    except DiskFault:
        raise
    except SnapshotError as error:
        _warn(f"not whole: {error}")
        return 1
    return 0


def _show(text: str) -> None:
    """Print a line of untrusted text."""
    print(printable(text))


def _warn(text: str) -> None:
    """Print untrusted text on stderr."""
    print(printable(text, multiline=True), file=sys.stderr)


def _verify(path: Path) -> int:
    faults, whole = [], []
    for folder in _folders_of(path):
        try:
            check_snapshot(folder)
            whole.append(folder)
        except SnapshotError as error:
            faults.append(error)
    is_same = not whole or _describe(whole[0], str(whole[0]))
    for folder in whole[1:]:
        _show(f"also whole: {folder}")
    for fault in faults:
        _warn(f"not whole: {fault}")
    return 0 if is_same and not faults else 1


def _folders_of(path: Path) -> list[Path]:
    """The snapshots of a run's folder, newest first, or the folder itself."""
    return snapshot_folders(snapshots_in(path)) or snapshot_folders(path) or [path]


def _describe(folder: Path, place: str) -> bool:
    """Print what a verified snapshot holds; whether it is the same model for transformers.

    `place` is what the user knows of where it is.
    """
    state = read_state(folder)
    shape = check_model(folder)
    entries = manifest_entries(folder)
    size = sum(size for size, _ in entries.values())
    best = state.best_loss
    loss = "nothing held out was evaluated before it"
    if best is not None:
        loss = f"{loss_in_words(state.data, best)}, the best that was held out before it"
    name = value_of(state.config, "run.name")
    _show(f"snapshot  {place}: whole, {len(entries)} files, {size:,} bytes, every hash right")
    _show(f"run       {name}, {state.run_id[:8]}, attempt {state.attempt_id[:8]}")
    _show(f"step      {state.step:,}, epoch {state.epoch + 1}, seed {state.seed}")
    print(
        f"model     {shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} wide, context "
        f"{shape.block_size}, {shape.vocab_size} {token_unit(state.data)}s"
    )
    if (adapters := read_adapters(folder)) is not None:
        at = f"@{adapters.revision[:12]}" if adapters.revision else ""
        _show(f"base      {adapters.base}{at}; here is LoRA of rank {adapters.lora.rank}")
    _show(f"text      {state.data.get('name')}, {str(state.data.get('fingerprint'))[:8]}")
    _show(f"loss      {loss}")
    _show(f"optimizer {_kept(shape, state)}")
    made_with = read_json(folder / "state.json").get("versions")
    if isinstance(made_with, dict):
        _show(f"versions  {', '.join(f'{name} {found}' for name, found in made_with.items())}")
    try:
        _show(f"logits    {compare_logits(folder, shape)}")
    except OtherModel as error:
        _warn(f"error: {str(error).replace(str(folder), place)}.")
        return False
    return True


def _kept(shape: ModelConfig, state: RunState) -> str:
    """What the optimizer keeps, as 'adamw: exp_avg, exp_avg_sq, step of 28 tensors'."""
    layout, name = layout_for(shape), value_of(state.config, "optim.name")
    layout.freeze(frozen_in(state.config))
    counts = Counter(", ".join(sorted(one)) or "nothing" for one in kept_in(layout, name).values())
    return f"{name}: {'; '.join(f'{keys} of {n} tensors' for keys, n in counts.items())}"


def _verify_remote(store: Store, revision: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = fetch_newest(with_retries(lambda: read_store(store, revision)), Path(folder))
        assert found.contents is not None
        for fault in found.faults:
            _warn(f"not whole: {fault}.")
        is_same = _describe(found.path, f"{found.contents.name} {found.folder}")
    folders = found.contents.folders()
    older = folders[folders.index(found.folder) + 1 :]
    if older:
        _show(f"older     {', '.join(older)}: not downloaded, so not verified")
    return 0 if is_same and not found.faults else 1


def _list(path: Path) -> None:
    readable = False
    for folder in _folders_of(path):
        try:
            entries, state = manifest_entries(folder), read_state(folder)
        except SnapshotError as error:
            _show(f"{folder.name}  {error}")
            continue
        readable = True
        _line(state.step, sum(size for size, _ in entries.values()), str(folder))
    if not readable:
        raise SnapshotError(f"{path} holds no snapshot that can be read. Name a run's folder.")


def _list_remote(store: Store, revision: str) -> None:
    repo = with_retries(lambda: read_store(store, revision))
    for folder in repo.folders():
        _line(remote_step(folder), _bytes_in(repo, folder), f"{repo.name} {folder}")
    if repo.latest is not None:
        _show(f"newest: step {repo.latest.step}, run {repo.latest.run_id[:8]}")
    if not repo.folders():
        raise SnapshotError(repo.lack)


def _bytes_in(repo: Contents, folder: str) -> int:
    return sum(file.size for path, file in repo.files.items() if path.startswith(f"{folder}/"))


def _line(step: int, size: int, where: str) -> None:
    _show(f"step {step:>10,}  {size:>15,} bytes  {where}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
