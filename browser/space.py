"""A Gradio Space with a model in it: a folder here, or a Space of the Hub (browser/app.py)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import (
    CommitOperation,
    CommitOperationAdd,
    CommitOperationDelete,
    RepoCard,
    SpaceCardData,
    constants,
)
from huggingface_hub.hf_api import RepoFile

from common.hub_client import hub_api
from snapshot.config_values import value_of
from snapshot.disk.folder import atomic_folder, visible
from snapshot.errors import SnapshotError
from snapshot.named_model import NamedModel, find_model, write_model
from snapshot.source import TIMEOUT_SECONDS
from store.errors import translate_errors
from store.kinds import NAMED_REPO, named_repo
from store.store import BRANCH, PREFIX

APP = Path(__file__).with_name("app.py")
GRADIO = "6.31.0"
REQUIREMENTS = f"torch\ntransformers>=5.24,<6\nhuggingface_hub>=2.4,<3\ngradio>={GRADIO},<7\n"
TAG = "accelerate-gpt"
"""On the card of each Space of this command, which may be replaced."""
KIND = "space"
OWN_FILES = {".gitattributes", "README.md", "app.py", "requirements.txt"}
MODEL = "model/"
"""The folder of a Space that holds the model."""


def make_space(source: str, target: str, public: bool) -> str:
    """Make the Space of a model, in a new folder or on the Hub; returns the folder or the address.

    `target` is a Space of the Hub if it begins with `hf://`, or has the form owner/name and neither
    it nor its owner exists here as a path. A Space that this command made is replaced there.

    Raises SnapshotError and DataError for what is no model and for a target that holds something
    else, StoreError if the Hub refuses, OSError if a file cannot be written.
    """
    repo = _repo_in(target)
    try:
        folder = Path(target).expanduser().absolute()
    except RuntimeError as error:
        why = f"names the home of an unknown user: write {Path(target).absolute()}"
        raise SnapshotError(f"--to {target} {why}.") from error
    if repo is None and os.path.lexists(folder):
        raise SnapshotError(f"--to {target} exists already. Name a new folder, or move it away.")
    named = find_model(source)
    if repo is None:
        with atomic_folder(folder.parent, folder.name) as building:
            _write_space(building, named, source)
        return target
    with TemporaryDirectory() as temporary:
        _write_space(Path(temporary), named, source)
        return _upload(repo, Path(temporary), not public)


def _repo_in(target: str) -> str | None:
    """The repo that a target names; None for a folder. Raises SnapshotError for any other name."""
    match = NAMED_REPO.fullmatch(target)
    if match is None:
        if target.startswith(PREFIX):
            raise SnapshotError(f"--to {target} is not a Space. Write {PREFIX}owner/name.")
        return None
    is_here = visible(Path(target)).exists() or visible(Path(target).parent).exists()
    if match[1] is None and is_here:
        return None
    if match[3] is not None:
        raise SnapshotError(
            f"--to {target} names a revision, and a Space has one page. Write {PREFIX}{match[2]}."
        )
    return match[2]


def _write_space(folder: Path, named: NamedModel, source: str) -> None:
    """Write the program, what it needs, the card, and the model as transformers loads it."""
    model = folder / MODEL
    model.mkdir()
    write_model(named, model)
    shutil.copyfile(APP, folder / APP.name)
    (folder / "requirements.txt").write_text(REQUIREMENTS)
    (folder / "README.md").write_text(_card(named, source), encoding="utf-8")


def _card(named: NamedModel, source: str) -> str:
    """The README.md, whose first lines make the repo a Gradio Space."""
    found, state = named_repo(source), named.state
    repo = None if found is None else found[0]
    metadata = SpaceCardData(
        title=named.folder.name if state is None else value_of(state.config, "run.name"),
        sdk="gradio",
        sdk_version=GRADIO,
        app_file=APP.name,
        license=None if state is None else value_of(state.config, "hub.license"),
        models=None if repo is None else [repo],
        tags=[TAG],
    )
    return (
        f"---\n{metadata.to_yaml()}\n---\n\nThe program and the model also run on your machine:\n\n"
        "```bash\npip install -r requirements.txt && python app.py\n```\n"
    )


def _upload(repo: str, folder: Path, private: bool) -> str:
    """Create or replace a Space, in one commit that gives it the files of a folder; its address.

    Raises SnapshotError for a Space with other files, or for a public one unless `--public` was
    given; StoreError if the Hub refuses.
    """
    api = hub_api(TIMEOUT_SECONDS)
    address = f"{constants.ENDPOINT}/spaces/{repo}"
    with translate_errors(repo, BRANCH):
        api.create_repo(repo, repo_type=KIND, space_sdk="gradio", private=private, exist_ok=True)
        info = api.repo_info(repo, repo_type=KIND)
        head = str(info.sha)
        tree = api.list_repo_tree(repo, repo_type=KIND, recursive=True, revision=head)
        there = sorted(entry.path for entry in tree if isinstance(entry, RepoFile))
        is_new = len(api.list_repo_commits(repo, repo_type=KIND)) == 1
        is_ours = is_new
        if "README.md" in there and not is_new:
            card = api.hf_hub_download(repo, "README.md", repo_type=KIND, revision=head)
            is_ours = TAG in (RepoCard.load(Path(card)).data.get("tags") or [])
    foreign = [path for path in there if not path.startswith(MODEL) and path not in OWN_FILES]
    if foreign or (there and not is_ours):
        raise SnapshotError(
            f"{address} holds {(foreign or there)[0]}, which this command has not made and would "
            "replace. Move it away, or name a new Space."
        )
    if private and not info.private:
        raise SnapshotError(
            f"{address} is public. Add --public, or make it private in its settings."
        )
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    operations: list[CommitOperation] = [
        CommitOperationAdd(name, path) for name, path in files.items()
    ]
    gone = [path for path in there if path.startswith(MODEL) and path not in files]
    operations += [CommitOperationDelete(path, is_folder=False) for path in gone]
    with translate_errors(repo, BRANCH):
        # The parent refuses to undo a commit made meanwhile. The client takes no other form of ids.
        parent = head if constants.REGEX_COMMIT_OID.fullmatch(head) else None
        api.create_commit(
            repo, operations, commit_message="Model", repo_type=KIND, parent_commit=parent
        )
    return address
