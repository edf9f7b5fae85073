"""What the files of a tokenizer, and of the model that it belongs to, say.

A token is special if tokenizer.json says so, if the added_tokens_decoder of tokenizer_config.json
does, or if an entry such as eos_token or a list of more tokens names it. No text may write one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

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
EDITED = ("added_tokens", "truncation", "padding")
"""The entries of a tokenizer.json that may change here."""
TEMPLATES = "chat_template"
"""The entry with a chat template, or with a list of named ones."""
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of templates with other names, such as tool_use.jinja."""


def special_tokens(settings: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The texts of the special tokens that a tokenizer_config.json names, and those it only lists.

    A name is that of an entry ...._token.
    """
    extra = settings.get(EXTRA)
    entries = settings | extra if isinstance(extra, dict) else settings
    named = {name: _text(entry) for name, entry in entries.items() if name.endswith(NAME_END)}
    lists = [one for one in (settings.get(MORE), extra) if isinstance(one, list)]
    listed = dict.fromkeys(map(_text, chain(*lists)))
    return {name: text for name, text in named.items() if text}, [*filter(None, listed)]


def _text(token: Any) -> str:
    """The text of a token that is an object or a text itself; empty if it is neither."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def chat_templates(settings: dict[str, Any]) -> dict[str, str]:
    """The chat templates of a tokenizer_config.json by name; a single one is named default."""
    entry = settings.get(TEMPLATES)
    entries = entry if isinstance(entry, list) else [{"name": "default", "template": entry}]
    pairs = [(one.get("name"), one.get("template")) for one in entries if isinstance(one, dict)]
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def own_form(
    content: bytes, settings: dict[str, Any], ends: Sequence[int], rows: int
) -> tuple[bytes, dict[str, Any]]:
    """A tokenizer.json and its settings, as snapshots have them.

    Every special token has its flag in tokenizer.json, which cuts and pads nothing. The settings
    are special tokens that it has (transformers would add others, beyond the embedding) and chat
    templates. `settings` are the entries of a tokenizer_config.json; without an eos_token there,
    one of `ends` is it. Special tokens without a row in an embedding of so many `rows` are removed;
    no text is such a token. Raises errors of any type for files that are not of this kind.
    """
    described = json.loads(content)
    added = described.setdefault("added_tokens", [])
    before = json.dumps({name: described.get(name) for name in EDITED})
    described["truncation"] = described["padding"] = None
    vocabulary = described["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram's has pairs of a piece and its score
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    # Gemma 3's smaller models have the tokenizer of the larger ones, with a token for images.
    for token in [one for one in added if one["special"] and one["id"] >= rows]:
        added.remove(token)
        vocabulary.pop(token["content"], None)
    known = {token["content"]: token for token in added}
    numbers = {**vocabulary, **{text: token["id"] for text, token in known.items()}}
    flags: dict[str, dict[str, bool]] = {}
    for number, entry in (settings.get(LISTED) or {}).items():
        if int(number) < rows:
            # transformers would add it, so a chat template that writes it had other tokens there.
            if numbers.get(entry["content"]) != int(number):
                raise ValueError(f"{entry['content']!r} is not token {number} there")
            flags[entry["content"]] = {name: entry[name] for name in FLAGS if name in entry}
    named, listed = special_tokens(settings)
    kept: dict[str, Any] = {name: text for name, text in named.items() if text in numbers}
    if "eos_token" not in kept:
        texts = [text for end in ends for text, number in numbers.items() if number == end]
        kept |= {"eos_token": texts[0]} if texts else {}
    more = [text for text in listed if text in numbers]
    for text in (*kept.values(), *more):
        flags.setdefault(text, {})["special"] = True
    for text, changed in flags.items():
        if text not in known:
            known[text] = {"id": numbers[text], "content": text} | dict.fromkeys(FLAGS, False)
            added.append(known[text])
        token = known[text]
        token |= changed | {"special": changed.get("special") or token["special"]}
    kept |= {MORE: more} if more else {}
    templates = chat_templates(settings)
    if templates.keys() == {"default"}:
        kept[TEMPLATES] = templates["default"]
    elif templates:
        kept[TEMPLATES] = [{"name": name, "template": text} for name, text in templates.items()]
    if json.dumps({name: described.get(name) for name in EDITED}) != before:
        content = json.dumps(described, ensure_ascii=False).encode() + b"\n"
    return content, kept


def end_ids(folder: Path) -> list[int]:
    """The ids that end a text according to config.json, then generation_config.json.

    They are all that says so where tokenizer_config.json holds a length and nothing else, as in
    openai-community/gpt2.
    """
    ids = (_end_ids(read_json(folder / file)) for file in (CONFIG, GENERATION))
    return list(dict.fromkeys(chain(*ids)))


def _end_ids(entries: dict[str, Any]) -> list[int]:
    named = entries.get(END_ID)
    ids = named if isinstance(named, list) else [named]
    return [one for one in ids if type(one) is int and one >= 0]


def generation_settings(folder: Path | None, stops: Collection[int]) -> dict[str, Any]:
    """The generation_config.json of a run that began from the model in `folder`; empty: none.

    `stops` are tokens that end a reply as well, if the run trains on conversations. Where the model
    has no generation_config.json, the ids in its config.json hold, which such a file would replace.
    """
    content = {} if folder is None else read_json(folder / GENERATION)
    if stops and folder is not None and not content:
        entries = read_json(folder / CONFIG)
        content = {key: entries[key] for key in IDS if key in entries}
    # Texts may name code (custom_generate); numbers and switches do not.
    content = {key: one for key, one in content.items() if not isinstance(one, str | dict)}
    if stops:
        content[END_ID] = list(dict.fromkeys([*_end_ids(content), *sorted(stops)]))
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
        settings |= read_json(folder / name)
    named = [
        {"name": name, "template": read(path).decode("utf-8", "replace")}
        for name, path in template_files(folder).items()
    ]
    return settings | ({TEMPLATES: named} if named else {})


def folder_key(folder: Path) -> str:
    """A digest of a tokenizer's folder; it changes whenever its tokenizer may have changed."""
    rows = read_json(folder / CONFIG).get("vocab_size")
    digest = hashlib.sha256(repr((end_ids(folder), rows)).encode())
    paths = [folder / name for name in TOKENIZER_FILES]
    for path in filter(Path.exists, [*paths, *template_files(folder).values()]):
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0".encode() + hashlib.sha256(read(path)).digest())
    return digest.hexdigest()


def read(path: Path) -> bytes:
    """The content of a file. Raises DataError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The entries of a JSON file; none if it is absent. Raises DataError."""
    try:
        content = json.loads(read(path)) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} cannot be read: it is not an object")
    return content
