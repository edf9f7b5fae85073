"""The mistakes in a configuration, collected so that all of them are reported at once."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from config.schema import Config


class Problems:
    """Collects a sentence for each value that breaks a rule."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.sentences: list[str] = []

    def need(self, holds: bool, key: str, rule: str) -> None:
        """Add a sentence with `rule`, unless it holds for the value of `key`.

        nan breaks every rule, and none of the rules would say why.
        """
        if holds:
            return
        value = value_of(self.config, key)
        if isinstance(value, float) and math.isnan(value):
            rule = "is not a number"
        is_written_otherwise = value is None or isinstance(value, bool | list)
        text = json.dumps(value) if is_written_otherwise else str(value)
        self.sentences.append(f"{key}={shortened(text)} {rule}.")


def value_of(config: Config, key: str) -> Any:
    """The value of a key such as data.source."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def shortened(text: str) -> str:
    """A value for an error, cut if it is long."""
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def why_not_storable(text: str) -> str:
    """The fault of a text that cannot be stored, and the remedy."""
    if "\0" in text:
        return "has a zero byte. Use another name"
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        return "has bytes that are not valid UTF-8. Use another name"
    return (
        f"has characters that the encoding of this locale, {encoding}, lacks: set PYTHONUTF8=1 in "
        "the environment"
    )


def is_storable(text: str) -> bool:
    """Whether a text is valid in JSON, YAML and file names."""
    try:
        return "\0" not in text and text.encode("utf-8") is not None
    except UnicodeEncodeError:  # invalid bytes of the command line are lone surrogates
        return False
