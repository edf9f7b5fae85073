"""Which tokens of a tokenizer are special, by its tokenizer.json and its tokenizer_config.json.

A token is special if tokenizer.json says so, if the added_tokens_decoder of tokenizer_config.json
does, or if an entry such as eos_token or a list of more tokens names it. No text may write one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from data.errors import DataError

FIRST_NAMES = ("eos_token", "bos_token", "unk_token", "pad_token")
NAME_END = "_token"
LISTED = "added_tokens_decoder"
"""The entry of tokenizer_config.json that lists added tokens by id."""
EXTRA, MORE = "extra_special_tokens", "additional_special_tokens"
"""Entries for more tokens: by name, as Gemma's image_token, or a list. transformers 5 writes lists
under the first name, and reads both; earlier versions know lists under the second."""
STATE = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

States = dict[str, dict[str, Any]]
"""Added tokens by id, each with the entries of `STATE`."""


def named_tokens(found: dict[str, Any]) -> dict[str, str]:
    """The texts of the tokens that a tokenizer_config.json names: its entries ...._token."""
    extra = found.get(EXTRA)
    found = found | extra if isinstance(extra, dict) else found
    others = (name for name in found if name.endswith(NAME_END) and name not in FIRST_NAMES)
    named = {}
    for name in (*FIRST_NAMES, *others):
        token = found.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            named[name] = token
    return named


def more_tokens(found: dict[str, Any]) -> list[str]:
    """The texts of the tokens that a tokenizer_config.json lists as special, without names."""
    lists = [found[name] for name in (MORE, EXTRA) if isinstance(found.get(name), list)]
    entries = [entry for listed in lists for entry in listed]
    texts = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    return list(dict.fromkeys(text for text in texts if isinstance(text, str) and text))


def listed_tokens(found: dict[str, Any], where: str) -> States:
    """The added tokens that a tokenizer_config.json lists. Raises DataError for odd entries."""
    try:
        listed = (found.get(LISTED) or {}).items()
        tokens = {
            str(int(number)): AddedToken(
                one["content"], **{name: one[name] for name in STATE[1:] if name in one}
            )
            for number, one in listed
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{where}: its {LISTED} cannot be read: {reason}") from error
    return {number: _state(token) for number, token in tokens.items()}


def refuse_unknown(listed: States, rust: Tokenizer, folder: Path) -> None:
    """Raise DataError if tokenizer_config.json lists a token that tokenizer.json lacks.

    transformers would add it, so a chat template that writes it would have other tokens there.
    """
    for number, token in listed.items():
        if rust.token_to_id(token["content"]) != int(number):
            raise DataError(
                f"data.tokenizer={folder}: tokenizer_config.json lists {token['content']!r} as "
                f"token {number}, and tokenizer.json has no such token. Write both again with "
                f"transformers: AutoTokenizer.from_pretrained({str(folder)!r})"
                ".save_pretrained('tokenizer'). Then add data.tokenizer=tokenizer."
            )


class Applied(NamedTuple):
    """What `apply_settings` has changed."""

    kept: States
    """The listed tokens that differ from tokenizer.json."""
    changed: States
    """The added tokens of tokenizer.json that differ now: a text may have other tokens."""


def apply_settings(rust: Tokenizer, listed: States, named: Iterable[str]) -> Applied:
    """Give a tokenizer the special tokens of its tokenizer_config.json; no id changes.

    Tokens that the vocabulary lacks are left out.
    """
    before = _states(rust)
    kept = {}
    for number, token in listed.items():
        old = before.get(number, {})
        token = token | {"special": token["special"] or old.get("special", False)}
        if old != token and rust.token_to_id(token["content"]) == int(number):
            kept[number] = token
    rust.add_tokens([AddedToken(**token) for token in kept.values()])
    make_special(rust, [text for text in named if rust.token_to_id(text) is not None])
    after = _states(rust)
    return Applied(
        kept, {number: after[number] for number in before if after[number] != before[number]}
    )


def make_special(rust: Tokenizer, texts: Iterable[str]) -> None:
    """Make tokens of the vocabulary special: only these can be encoded as text."""
    added = {token["content"]: token for token in _states(rust).values()}
    tokens = [added.get(text, {"content": text, "normalized": False}) for text in texts]
    rust.add_special_tokens([AddedToken(**token | {"special": True}) for token in tokens])


def special_ids(rust: Tokenizer) -> dict[str, int]:
    """The special tokens by text."""
    added = rust.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.special}


def _states(rust: Tokenizer) -> States:
    return {str(i): _state(token) for i, token in rust.get_added_tokens_decoder().items()}


def _state(token: AddedToken) -> dict[str, Any]:
    return {name: getattr(token, name) for name in STATE}
