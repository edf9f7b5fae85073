"""A static Space on the Hub: a folder of files, uploaded in one commit."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import (
    CommitOperation,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
)
from huggingface_hub.hf_api import RepoFile

from data.tokenizer import TOKENIZER_FILES
from snapshot.disk.files import LARGEST_JSON_BYTES, read_json
from snapshot.disk.model import CONFIG
from snapshot.errors import SnapshotError
from store.errors import translate_errors
from store.http import hub_api
from store.repo import OWN_FILES
from store.store import BRANCH

SPACE = "space.json"
"""The file that identifies a Space of this project. It lists the others."""
PAGE = Path(__file__).with_name("page")
TEMPLATE = {"index.html", "style.css"}
"""The files that the first commit of a static Space may hold."""
KIND = "space"


def files_made(description: object) -> set[str]:
    """The files that a space.json lists; none if it is not one of this command's."""
    if not isinstance(description, dict) or not {"title", "weights"} <= description.keys():
        return set()
    of_older = [
        *OWN_FILES,
        SPACE,
        CONFIG,
        *TOKENIZER_FILES,
        *(file.name for file in PAGE.iterdir()),
    ]
    listed = [description["weights"], description.get("files", of_older)]
    if not all(isinstance(names, list) for names in listed):
        return set()
    return {name for names in listed for name in names if isinstance(name, str)}


def upload_space(repo_id: str, folder: Path, private: bool, timeout: float) -> str:
    """Create or update a Space, so that it holds the files of a folder; returns its address.

    `timeout`: seconds that a request waits for data. Raises SnapshotError for a Space with other
    files, or for a public one unless `--public` was given; HubError if the Hub refuses.
    """
    api = hub_api(timeout)
    address = f"{constants.ENDPOINT}/spaces/{repo_id}"
    with translate_errors(repo_id, BRANCH):
        api.create_repo(repo_id, repo_type=KIND, space_sdk="static", private=private, exist_ok=True)
        info = api.repo_info(repo_id, repo_type=KIND)
        head = str(info.sha)
        tree = list(api.list_repo_tree(repo_id, repo_type=KIND, recursive=True, revision=head))
        is_new = len(api.list_repo_commits(repo_id, repo_type=KIND)) == 1
    there = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
    made = _files_made_there(api, repo_id, head, there.get(SPACE))
    others = sorted(there.keys() - OWN_FILES - (TEMPLATE if is_new else set()))
    if others and not made:
        raise SnapshotError(
            f"{address} holds {others[0]}, but is not a Space that this command made. Name a new "
            "one."
        )
    if foreign := [path for path in others if path not in made]:
        raise SnapshotError(
            f"{address} holds {foreign[0]}, which this command has not made and would delete. Move "
            "it away, or name a new Space."
        )
    if private and not info.private:
        raise SnapshotError(
            f"{address} is public. Add --public, or make it private in its settings."
        )
    added = sorted(path for path in folder.rglob("*") if path.is_file())
    paths = {path.relative_to(folder).as_posix(): path for path in added}
    operations: list[CommitOperation] = [
        CommitOperationAdd(name, path) for name, path in paths.items()
    ]
    gone = sorted(there.keys() - paths.keys() - OWN_FILES)
    operations += [CommitOperationDelete(path, is_folder=False) for path in gone]
    with translate_errors(repo_id, BRANCH):
        api.create_commit(
            repo_id,
            operations,
            commit_message="Model in the browser",
            repo_type=KIND,
            # Refuses to undo a commit made meanwhile. The client takes no other form of ids.
            parent_commit=head if constants.REGEX_COMMIT_OID.fullmatch(head) else None,
        )
    return address


def _files_made_there(api: HfApi, repo_id: str, head: str, size: int | None) -> set[str]:
    """`files_made` of a Space on the Hub, whose space.json has that size, if there is one."""
    if size is None or size > LARGEST_JSON_BYTES:
        return set()
    with TemporaryDirectory() as folder:
        with translate_errors(repo_id, head):
            path = api.hf_hub_download(
                repo_id, SPACE, repo_type=KIND, revision=head, local_dir=folder
            )
        with suppress(SnapshotError):
            return files_made(read_json(Path(path)))
    return set()
