"""Look at snapshots without training.

python -m snapshot list PATH_OR_REPO      what there is, a line each, newest first
python -m snapshot verify PATH_OR_REPO    read all of a folder's, or a repo's newest: hashes,
                                          headers, what it holds
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from snapshot.contents import check_model
from snapshot.errors import SnapshotError
from snapshot.fetch import Remote, folders_in, look_at, remote_step
from snapshot.files import manifest_entries, read_json, snapshot_folders
from snapshot.hub import BRANCH, Hub
from snapshot.hub_errors import HubError
from snapshot.resume import NAMED_REPO, snapshots_in, value_of
from snapshot.state import check_snapshot, read_state
from snapshot.store import fetch_newest, patiently


def main(arguments: list[str]) -> int:
    """Print what was found; the exit code: 1 for a snapshot that is not whole, 2 for a mistake."""
    parser = argparse.ArgumentParser(prog="python -m snapshot", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("verify", "list"))
    parser.add_argument("place", metavar="PATH_OR_REPO", help="a folder, or owner/name[@revision]")
    options = parser.parse_args(arguments)
    path, repo = Path(options.place), NAMED_REPO.fullmatch(options.place)
    if not path.exists() and repo is None:
        print(f"error: {options.place} is neither a folder nor a repo's name.", file=sys.stderr)
        return 2
    try:
        if path.exists():
            (_verify if options.what == "verify" else _list)(path)
        else:
            assert repo is not None
            hub, revision = Hub(repo[1]), repo[2] or BRANCH
            (_verify_remote if options.what == "verify" else _list_remote)(hub, revision)
    except SnapshotError as error:
        print(f"not whole: {error}", file=sys.stderr)
        return 1
    except HubError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _verify(path: Path) -> None:
    faults, whole = [], []
    for folder in _folders_of(path):
        try:
            check_snapshot(folder)
            whole.append(folder)
        except SnapshotError as error:
            faults.append(str(error))
    if whole:
        _describe(whole[0])
        for folder in whole[1:]:
            print(f"also whole: {folder}")
    if faults:
        raise SnapshotError("\nnot whole: ".join(faults))


def _folders_of(path: Path) -> list[Path]:
    """The snapshots of a run's folder, newest first, or a snapshot itself."""
    return snapshot_folders(snapshots_in(path)) or snapshot_folders(path) or [path]


def _describe(folder: Path) -> None:
    """What a verified snapshot holds."""
    state = read_state(folder)
    shape = check_model(folder)
    entries = manifest_entries(folder)
    size = sum(size for size, _ in entries.values())
    loss = "unknown" if state.best_loss is None else f"{state.best_loss:.4f} nats per character"
    name = value_of(state.config, "run.name")
    print(f"snapshot  {folder}: whole, {len(entries)} files, {size:,} bytes, every hash right")
    print(f"run       {name}, {state.run_id[:8]}, attempt {state.attempt_id[:8]}")
    print(f"step      {state.step:,}, epoch {state.epoch + 1}, seed {state.seed}")
    print(
        f"model     {shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} wide, context "
        f"{shape.block_size}, {shape.vocab_size} characters"
    )
    print(f"text      {state.data.get('name')}, {str(state.data.get('fingerprint'))[:8]}")
    print(f"loss      {loss}, the best held out so far")
    print("optimizer AdamW, both moments and the step of every weight")
    made_with = read_json(folder / "state.json").get("versions")
    if isinstance(made_with, dict):
        print(f"versions  {', '.join(f'{name} {found}' for name, found in made_with.items())}")


def _verify_remote(hub: Hub, revision: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        found = fetch_newest(hub, revision, Path(place))
        for fault in found.faults:
            print(f"warning: {fault}")
        assert found.path is not None
        _describe(found.path)
        if found.faults:
            raise SnapshotError("a newer one is there, see above")


def _list(path: Path) -> None:
    for folder in _folders_of(path):
        try:
            entries, state = manifest_entries(folder), read_state(folder)
        except SnapshotError as error:
            print(f"{folder.name}  {error}")
            continue
        _line(state.step, sum(size for size, _ in entries.values()), str(folder))


def _list_remote(hub: Hub, revision: str) -> None:
    remote = patiently(lambda: look_at(hub, revision))
    for folder in folders_in(remote.files):
        _line(remote_step(folder), _bytes_in(remote, folder), f"{remote.name} {folder}")
    if remote.latest is not None:
        print(f"latest.json: step {remote.latest.step}, run {remote.latest.run_id[:8]}")
    if not folders_in(remote.files):
        raise SnapshotError(f"{remote.name} holds no snapshot.")


def _bytes_in(remote: Remote, folder: str) -> int:
    return sum(file.size for path, file in remote.files.items() if path.startswith(f"{folder}/"))


def _line(step: int, size: int, where: str) -> None:
    print(f"step {step:>10,}  {size:>15,} bytes  {where}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
