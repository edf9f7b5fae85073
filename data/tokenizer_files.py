"""What the files of a tokenizer, and of the model that it belongs to, say.

tokenizer_config.json of openai-community/gpt2 holds a length and nothing else. The end-of-text
token is then known from the ids in config.json and generation_config.json, and from the class of
the tokenizer.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data.errors import DataError
from data.special_tokens import LISTED, MORE, listed_tokens, more_tokens, named_tokens
from data.tokenizer import TOKENIZER_FILES

CONFIG, GENERATION = "config.json", "generation_config.json"
END_ID = "eos_token_id"


def kept_settings(found: dict[str, Any], where: str) -> dict[str, Any]:
    """The special tokens and the chat templates of a tokenizer_config.json.

    Raises DataError for a list of added tokens that cannot be read.
    """
    kept: dict[str, Any] = {**named_tokens(found)}
    if more := more_tokens(found):
        kept[MORE] = more
    if listed := listed_tokens(found, where):
        kept[LISTED] = listed
    template = found.get("chat_template")
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


def model_settings(folder: Path, name: str) -> dict[str, Any]:
    """The entries of a model's JSON file; none if it is absent or is no JSON object."""
    content: Any = None
    with suppress(OSError, ValueError, RecursionError):  # whoever builds the model reports it
        content = json.loads((folder / name).read_bytes())
    return content if isinstance(content, dict) else {}


def end_ids(folder: Path) -> list[int]:
    """The ids that end a text according to config.json, then generation_config.json."""
    found: list[int] = []
    for file in (CONFIG, GENERATION):
        named = model_settings(folder, file).get(END_ID)
        ids = named if isinstance(named, list) else [named]
        found += [one for one in ids if type(one) is int and one >= 0 and one not in found]
    return found


def end_token(folder: Path, rust: Tokenizer, settings: dict[str, Any]) -> dict[str, str]:
    """The eos_token of a folder whose tokenizer's own files name none; nothing if none is known.

    `settings` are the entries of these files.
    """
    by_id = (rust.id_to_token(number) for number in end_ids(folder))
    for text in chain(by_id, _end_of_class(folder, settings)):
        if text is not None and rust.token_to_id(text) is not None:
            return {"eos_token": text}
    return {}


def _end_of_class(folder: Path, settings: dict[str, Any]) -> Iterator[str]:
    """The default of transformers' class of the tokenizer. No other class is looked at."""
    if find_spec("transformers") is None:
        return
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    config = model_settings(folder, CONFIG)
    by_family = TOKENIZER_MAPPING_NAMES.get(str(config.get("model_type")))
    for name in (settings.get("tokenizer_class"), config.get("tokenizer_class"), by_family):
        with suppress(AttributeError, ImportError, TypeError, ValueError):  # no such class
            found = getattr(transformers, str(name))
            if issubclass(found, transformers.PreTrainedTokenizerBase):
                default = inspect.signature(found).parameters["eos_token"].default
                yield str(default)
                return


def added_before(rust: Tokenizer, text: str) -> list[int]:
    """The tokens that a tokenizer's post-processor puts before a text."""
    encoded = rust.encode(text, add_special_tokens=True)
    return encoded.ids[: sum(1 for _ in takewhile(bool, encoded.special_tokens_mask))]


def beyond_embedding(folder: Path, rust: Tokenizer) -> set[str]:
    """The special tokens that the model in a folder has no rows for. No text is such a token.

    Gemma 3's smaller models have the tokenizer of the larger ones, with a token for images.
    """
    config = model_settings(folder, CONFIG)
    rows = config.get("vocab_size")
    if type(rows) is not int:
        return set()
    added = rust.get_added_tokens_decoder().items()
    return {one.content for number, one in added if one.special and number >= rows}


def without_tokens(content: bytes, tokens: set[str]) -> bytes:
    """A tokenizer.json without some of its added tokens."""
    described = json.loads(content)
    listed, vocabulary = described["added_tokens"], described["model"].get("vocab")
    described["added_tokens"] = [one for one in listed if one["content"] not in tokens]
    if isinstance(vocabulary, dict):
        for token in tokens:
            vocabulary.pop(token, None)
    return json.dumps(described, ensure_ascii=False).encode() + b"\n"


CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of templates with other names, such as tool_use.jinja."""


def template_files(folder: Path) -> dict[str, Path]:
    """The files of chat templates in a folder, by the name of the template."""
    default = folder / CHAT_TEMPLATE
    found = {"default": default} if default.exists() else {}
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return found | {path.stem: path for path in more}


def chat_template(folder: Path) -> dict[str, Any]:
    """The chat_template entry that the files of chat templates stand for; nothing without any.

    transformers prefers it to the entry of tokenizer_config.json.
    """
    texts = {
        name: read(path).decode("utf-8", "replace") for name, path in template_files(folder).items()
    }
    if not texts.keys() - {"default"}:
        return {"chat_template": texts["default"]} if texts else {}
    return {"chat_template": [{"name": name, "template": text} for name, text in texts.items()]}


def has_subwords(folder: Path) -> bool:
    """Whether a folder has a tokenizer of subwords, which has an end-of-text token."""
    return "eos_token" in read_json(folder / TOKENIZER_FILES[1])


def folder_key(folder: Path) -> str:
    """A digest of a tokenizer's folder; it changes whenever its tokenizer may have changed."""
    digest = hashlib.sha256()
    first, *others = (folder / name for name in TOKENIZER_FILES)
    others = [path for path in others if path.exists()]
    for path in (first, *others, *template_files(folder).values()):
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0".encode() + hashlib.sha256(read(path)).digest())
    if not (folder / TOKENIZER_FILES[1]).exists() or not has_subwords(folder):
        digest.update(repr(end_ids(folder)).encode())
    return digest.hexdigest()


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} cannot be read: it is not an object")
    return content
