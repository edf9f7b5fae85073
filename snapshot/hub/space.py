"""A static Space on the Hub: a folder of files, uploaded in one commit."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import (
    CommitOperation,
    CommitOperationAdd,
    CommitOperationDelete,
    constants,
)
from huggingface_hub.hf_api import RepoFile

from snapshot.disk.reference import WEIGHTS
from snapshot.errors import SnapshotError
from snapshot.hub.client import OWN_FILES
from snapshot.hub.errors import translate_errors
from snapshot.hub.http import hub_api
from snapshot.hub.remote import BRANCH

SPACE = "space.json"
"""The file by which a Space of this project is known."""
OF_SPACES = re.compile(
    rf".+\.js|index\.html|style\.css|README\.md|\.gitattributes|{re.escape(SPACE)}|config\.json|"
    rf"tokenizer(_config)?\.json|special_tokens_map\.json|{WEIGHTS.pattern}"
)
"""Names of the files of a Space of this project, of any version; the page is written in .js."""
TEMPLATE = {"index.html", "style.css"}
"""What the first commit of a static Space may hold."""
KIND = "space"


def upload_space(repo_id: str, folder: Path, private: bool, timeout: float) -> str:
    """Create or update a Space, so that it holds the files of a folder; returns its address.

    `timeout`: seconds that a request waits for data. Raises SnapshotError for a Space with other
    files, or that is public where a private one is meant; HubError if the Hub refuses.
    """
    api = hub_api(timeout)
    address = f"{constants.ENDPOINT}/spaces/{repo_id}"
    with translate_errors(repo_id, BRANCH):
        api.create_repo(repo_id, repo_type=KIND, space_sdk="static", private=private, exist_ok=True)
        is_private = bool(api.repo_info(repo_id, repo_type=KIND).private)
        tree = list(api.list_repo_tree(repo_id, repo_type=KIND, recursive=True))
        is_new = len(api.list_repo_commits(repo_id, repo_type=KIND)) == 1
    there = {entry.path for entry in tree if isinstance(entry, RepoFile)}
    others = sorted(there - OWN_FILES - (TEMPLATE if is_new else set()))
    if others and SPACE not in there:
        raise SnapshotError(
            f"{address} holds {others[0]}, and is no Space that this command made. Name a new one."
        )
    if foreign := [path for path in others if not OF_SPACES.fullmatch(path)]:
        raise SnapshotError(
            f"{address} holds {foreign[0]}, which this command has not made and would delete. Move "
            "it away, or name a new Space."
        )
    if private and not is_private:
        raise SnapshotError(
            f"{address} is public. Add --public, or make it private in its settings."
        )
    added = sorted(path for path in folder.rglob("*") if path.is_file())
    paths = {path.relative_to(folder).as_posix(): path for path in added}
    operations: list[CommitOperation] = [
        CommitOperationAdd(name, path) for name, path in paths.items()
    ]
    gone = sorted(there - paths.keys() - OWN_FILES)
    operations += [CommitOperationDelete(path, is_folder=False) for path in gone]
    with translate_errors(repo_id, BRANCH):
        api.create_commit(
            repo_id, operations, commit_message="Model in the browser", repo_type=KIND
        )
    return address
