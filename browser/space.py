"""A static Space from a model: a page that runs it in the browser (browser/page/)."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import SpaceCardData, constants
from tokenizers import pre_tokenizers

from browser.upload import PAGE, SPACE, files_made, upload_space
from data.subwords import SubwordTokenizer, tokenizer_of
from data.tokenizer import TOKENIZER_FILES, Tokenizer, refuse_larger_than
from snapshot.config_values import value_of
from snapshot.disk.files import names_in, read_json, visible, write_json
from snapshot.disk.model import WHOLE
from snapshot.disk.pruning import remove_folder
from snapshot.disk.reading import files_of
from snapshot.disk.writing import atomic_folder
from snapshot.errors import SnapshotError
from snapshot.named_model import TIMEOUT_SECONDS, NamedModel, find_model, write_model
from store.kinds import NAMED_REPO, named_repo
from store.store import PREFIX

PIECE_BYTES = 200_000_000
"""The largest file in bytes. The page reads each file at once."""
KNOWN_BPE = {
    "dropout": (None, 0.0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "ignore_merges": (None, False),
}
"""Entries of a BPE model that change its tokens, with the values that the page supports."""


def make_space(source: str, target: str, public: bool) -> str:
    """Make the Space of a model, in a folder or on the Hub; returns the folder or the address.

    `target` is a repo if it begins with `hf://`, or has the form owner/name and neither it nor its
    owner exists here as a path. An existing Space of this command is replaced.

    Raises SnapshotError and DataError for a model that the page cannot run and for a target that
    holds something else, HubError if the Hub refuses, OSError if a file cannot be written.
    """
    repo = _target_repo(target)
    folder = None if repo is not None else Path(target).expanduser().absolute()
    if folder is not None:
        _refuse_other_contents(folder)
    named = find_model(source)
    if not named.sizes.page_computes:
        raise SnapshotError(
            f"{named.name} is a {named.sizes.family} that the page of a Space cannot run: it only "
            "runs GPT-2 as published. Name a run of this project's GPT-2, or another GPT-2."
        )
    tokenizer = tokenizer_of(named.folder)
    refuse_larger_than(named.sizes.vocab_size, tokenizer, str(named.folder))
    if folder is not None:
        with atomic_folder(folder.parent, folder.name, _replace) as building:
            _write_space(building, named, tokenizer, source)
        return target
    assert repo is not None
    with TemporaryDirectory() as temporary:
        _write_space(Path(temporary), named, tokenizer, source)
        return upload_space(repo, Path(temporary), not public, TIMEOUT_SECONDS)


def _target_repo(target: str) -> str | None:
    """The repo that a target names; None for a folder. Raises SnapshotError for any other name."""
    match = NAMED_REPO.fullmatch(target)
    if match is None:
        if target.startswith(PREFIX):
            raise SnapshotError(f"--to {target} is not a Space. Write {PREFIX}owner/name.")
        return None
    owner = match[2].partition("/")[0]
    is_here = visible(Path(target)).exists() or visible(Path(owner)).exists()
    if match[1] is None and is_here:
        return None
    if match[3] is not None:
        raise SnapshotError(
            f"--to {target} names a revision, and a Space has one page. Write {PREFIX}{match[2]}."
        )
    return match[2]


def _refuse_other_contents(folder: Path) -> None:
    """Raise SnapshotError unless a folder is absent, empty, or has only what this command made."""
    if not visible(folder).exists():
        return
    if folder.is_symlink() or not folder.is_dir():
        kind = "a link" if folder.is_symlink() else "a file"
        raise SnapshotError(f"--to {folder} is {kind}. Name a new folder.")
    names, made = names_in(folder), _files_made(folder / SPACE)
    if names and not made:
        raise SnapshotError(
            f"--to {folder} has files, but is not a Space that this command made. Name a new "
            "folder."
        )
    if others := sorted(name for name in names if name not in made or (folder / name).is_dir()):
        raise SnapshotError(
            f"--to {folder} would be replaced, but this command did not make {others[0]} in it. "
            "Move it away, or name a new folder."
        )


def _files_made(path: Path) -> set[str]:
    with suppress(SnapshotError):
        return files_made(read_json(path))
    return set()


def _replace(folder: Path) -> None:
    """Remove a Space of this command. Raises SnapshotError if the folder has other files by now."""
    _refuse_other_contents(folder)
    if folder.exists():
        remove_folder(folder)


def _write_space(folder: Path, named: NamedModel, tokenizer: Tokenizer, source: str) -> None:
    """Write the page, the model, and the facts about it that the page needs."""
    tokenizer.save(folder)
    if isinstance(tokenizer, SubwordTokenizer):
        _check_subwords(read_json(folder / TOKENIZER_FILES[0]), named.name)
    write_model(named, named.load(), folder, PIECE_BYTES)
    shutil.copytree(PAGE, folder, dirs_exist_ok=True)
    found = named_repo(source)
    repo = None if found is None else found[0]
    title = _title(named, repo)
    (folder / "README.md").write_text(_card(named, title, repo), encoding="utf-8")
    write_json(
        folder / SPACE,
        {
            "title": title,
            "model": None if repo is None else f"{constants.ENDPOINT}/{repo}",
            "beginning": tokenizer.beginning,
            "end_of_text": tokenizer.end_of_text,
            "weights": [path.name for path in files_of(folder, WHOLE)],
            "files": sorted({*names_in(folder), SPACE}),
        },
    )


def _title(named: NamedModel, repo: str | None) -> str:
    if named.state is not None:
        return str(value_of(named.state.config, "run.name"))
    return named.folder.name if repo is None else repo.partition("/")[2]


def _card(named: NamedModel, title: str, repo: str | None) -> str:
    """The README.md, whose first lines make the repo a static Space."""
    license_name = None if named.state is None else value_of(named.state.config, "hub.license")
    metadata = SpaceCardData(
        title=title, sdk="static", license=license_name, models=None if repo is None else [repo]
    )
    return (
        f"---\n{metadata.to_yaml()}\n---\n\n"
        "A GPT in the browser: the page computes the model, and sends no text anywhere. Offline:\n"
        "\n```bash\npython -m http.server --bind 127.0.0.1\n```\n"
    )


def _check_subwords(content: dict[str, Any], name: str) -> None:
    """Raise SnapshotError for a tokenizer.json that browser/page/tokenizer.js does not support."""
    if (reason := _unknown_in(content)) is not None:
        raise SnapshotError(
            f"the tokenizer of {name} {reason}; the page of a Space only supports characters and "
            "GPT-2's byte-level BPE. Use a model with one of these (data.tokenizer=char or "
            "bpe:<size>)."
        )


def _unknown_in(content: dict[str, Any]) -> str | None:
    """An unsupported part of a tokenizer.json; None if the page supports all of it."""
    model, words = content["model"], content.get("pre_tokenizer") or {}
    decoder = content.get("decoder") or {}
    kind = model.get("type", "BPE" if "merges" in model else None)  # older files have no type
    if kind != "BPE":
        return f"is of the type {kind}"
    if (words.get("type"), decoder.get("type")) != ("ByteLevel", "ByteLevel"):
        return f"splits texts by {words.get('type')}"
    if words.get("add_prefix_space") or not words.get("use_regex", True):
        return "splits texts by other rules than GPT-2's"
    if content.get("normalizer") is not None:
        return "normalizes texts"
    for entry, known in KNOWN_BPE.items():
        if model.get(entry) not in known:
            return f"has {entry}={json.dumps(model[entry])}"
    if not set(pre_tokenizers.ByteLevel.alphabet()) <= model["vocab"].keys():
        return "lacks some of the 256 bytes"
    if any(not token.get("special") for token in content.get("added_tokens", [])):
        return "finds added tokens within texts"
    return None
