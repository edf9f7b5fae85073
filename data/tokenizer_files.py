"""What the files of a tokenizer, and of the model that it belongs to, say.

A token is special if tokenizer.json says so, if the added_tokens_decoder of tokenizer_config.json
does, or if an entry such as eos_token or a list of more tokens names it. No text may write one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from data.errors import DataError
from data.tokenizer import TOKENIZER_FILES

CONFIG, GENERATION = "config.json", "generation_config.json"
END_ID = "eos_token_id"
IDS = ("bos_token_id", END_ID, "pad_token_id")
NAME_END = "_token"
LISTED = "added_tokens_decoder"
"""The entry of tokenizer_config.json that lists added tokens by id."""
EXTRA, MORE = "extra_special_tokens", "additional_special_tokens"
"""Entries for more tokens: by name, as Gemma's image_token, or a list. transformers 5 writes lists
under the first name, and reads both; earlier versions know lists under the second."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of templates with other names, such as tool_use.jinja."""


def named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """The texts of the tokens that a tokenizer_config.json names: its entries ...._token."""
    extra = settings.get(EXTRA)
    entries = settings | extra if isinstance(extra, dict) else settings
    named = {name: _text(entry) for name, entry in entries.items() if name.endswith(NAME_END)}
    return {name: text for name, text in named.items() if text}


def more_tokens(settings: dict[str, Any]) -> list[str]:
    """The texts of the tokens that a tokenizer_config.json lists as special, without names."""
    lists = [settings[name] for name in (MORE, EXTRA) if isinstance(settings.get(name), list)]
    texts = (_text(entry) for listed in lists for entry in listed)
    return list(dict.fromkeys(text for text in texts if text))


def _text(token: Any) -> str:
    """The text of a token that is an object or a text itself; empty if it is neither."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def kept_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The special tokens and the chat templates of a tokenizer_config.json."""
    kept: dict[str, Any] = {**named_tokens(settings)}
    if more := more_tokens(settings):
        kept[MORE] = more
    template = settings.get("chat_template")
    if isinstance(template, str) or (
        isinstance(template, list) and all(map(_is_named_template, template))
    ):
        kept["chat_template"] = template
    return kept


def _is_named_template(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and set(entry) == {"name", "template"}
        and all(isinstance(text, str) for text in entry.values())
    )


def add_listed_tokens(rust: Tokenizer, entries: dict[str, Any], where: str) -> None:
    """Give a tokenizer the flags of the added tokens that its tokenizer_config.json lists.

    `where` is data.tokenizer=<folder>. Raises DataError for odd entries, and for a token that
    tokenizer.json lacks: transformers would add it, so a chat template that writes it would have
    other tokens there.
    """
    known, tokens = rust.get_added_tokens_decoder(), []
    try:
        for number, entry in entries.items():
            flags = {name: entry[name] for name in FLAGS if name in entry}
            token = AddedToken(entry["content"], **flags)
            if rust.token_to_id(token.content) != int(number):
                raise ValueError(f"{token.content!r} is not token {number} in tokenizer.json")
            token.special |= int(number) in known and known[int(number)].special
            tokens.append(token)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        folder = where.partition("=")[2]
        raise DataError(
            f"{where}: its {LISTED} cannot be used: {error}. Write both files again with "
            f"transformers: AutoTokenizer.from_pretrained({folder!r}).save_pretrained('tokenizer')."
            " Then add data.tokenizer=tokenizer."
        ) from error
    rust.add_tokens(tokens)


def make_special(rust: Tokenizer, texts: Iterable[str]) -> None:
    """Make tokens of the vocabulary special: only these can be encoded as text."""
    known = {token.content: token for token in rust.get_added_tokens_decoder().values()}
    for text in texts:
        if rust.token_to_id(text) is not None:
            token = known.get(text, AddedToken(text, normalized=False))
            token.special = True
            rust.add_special_tokens([token])


def end_ids(folder: Path) -> list[int]:
    """The ids that end a text according to config.json, then generation_config.json.

    They are all that says so where tokenizer_config.json holds a length and nothing else, as in
    openai-community/gpt2.
    """
    found: list[int] = []
    for file in (CONFIG, GENERATION):
        named = model_settings(folder, file).get(END_ID)
        ids = named if isinstance(named, list) else [named]
        found += [one for one in ids if type(one) is int and one >= 0 and one not in found]
    return found


def generation_settings(folder: Path | None, stops: Collection[int]) -> dict[str, Any]:
    """The generation_config.json of a run that began from the model in `folder`; empty: none.

    `stops` are tokens that end a reply as well, if the run trains on conversations. Where the model
    has no generation_config.json, the ids in its config.json hold, which such a file would replace.
    """
    content = {} if folder is None else model_settings(folder, GENERATION)
    if stops and folder is not None and not content:
        entries = model_settings(folder, CONFIG)
        content = {key: entries[key] for key in IDS if key in entries}
    # Texts may name code (custom_generate); numbers and switches do not.
    content = {key: one for key, one in content.items() if not isinstance(one, str | dict)}
    if stops:
        ends = content.get(END_ID)
        both = [*(ends if isinstance(ends, list) else [ends]), *sorted(stops)]
        content[END_ID] = list(dict.fromkeys(end for end in both if type(end) is int))
    return content


def without_rows(content: bytes, rows: int) -> bytes:
    """A tokenizer.json without the special tokens for which an embedding has no rows.

    No text is such a token. Gemma 3's smaller models have the tokenizer of the larger ones, with a
    token for images.
    """
    with suppress(LookupError, TypeError, ValueError, RecursionError):  # whoever parses it says so
        described = json.loads(content)
        added, vocabulary = described["added_tokens"], described["model"]["vocab"]
        beyond = {one["content"] for one in added if one["id"] >= rows and one["special"]}
        if beyond:
            described["added_tokens"] = [one for one in added if one["content"] not in beyond]
            for token in beyond if isinstance(vocabulary, dict) else ():
                vocabulary.pop(token, None)
            return json.dumps(described, ensure_ascii=False).encode() + b"\n"
    return content


def template_files(folder: Path) -> dict[str, Path]:
    """The files of chat templates in a folder, by the name of the template."""
    default = folder / CHAT_TEMPLATE
    found = {"default": default} if default.exists() else {}
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return found | {path.stem: path for path in more}


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """All that the files of a folder say of its tokenizer, but for tokenizer.json.

    As transformers does, this prefers files of chat templates to an entry of tokenizer_config.json.
    """
    settings: dict[str, Any] = {}
    for name in reversed(TOKENIZER_FILES[1:]):
        settings |= model_settings(folder, name)
    files = template_files(folder)
    texts = {name: read(path).decode("utf-8", "replace") for name, path in files.items()}
    if texts.keys() == {"default"}:
        settings["chat_template"] = texts["default"]
    elif texts:
        named = [{"name": name, "template": text} for name, text in texts.items()]
        settings["chat_template"] = named
    return settings


def folder_key(folder: Path) -> str:
    """A digest of a tokenizer's folder; it changes whenever its tokenizer may have changed."""
    digest = hashlib.sha256(repr(end_ids(folder)).encode())
    first, *others = (folder / name for name in TOKENIZER_FILES)
    others = [path for path in others if path.exists()]
    for path in (first, *others, *template_files(folder).values()):
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0".encode() + hashlib.sha256(read(path)).digest())
    return digest.hexdigest()


def model_settings(folder: Path, name: str) -> dict[str, Any]:
    """The entries of a JSON file in a folder; none if it is absent. Raises DataError."""
    return read_json(folder / name) if (folder / name).exists() else {}


def read(path: Path) -> bytes:
    """The content of a file. Raises DataError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises DataError."""
    try:
        content = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} cannot be read: it is not an object")
    return content
