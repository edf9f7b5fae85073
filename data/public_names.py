"""The parts of a configuration that may leave this machine: names, but no folders.

Snapshots are uploaded, perhaps to a public repo. A resume takes the folders from its own command.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from common.printable import redact_urls
from data.reading.groups import is_hub_name

URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def public_name(source: str) -> str:
    """A source without the folders of this machine, and without credentials in a URL.

    Of a path that is its last part; names on the Hub and URLs stay.
    """
    if URL.match(source):
        return redact_urls(source)
    return source if is_hub_name(source) else _last_part(source)


def public_resume(resume: str) -> str:
    """`public_name` of another run's snapshot, with four digits of the hash of its path.

    They tell two paths with the same name apart, and are too few to guess a path.
    """
    name = public_name(resume)
    if name == resume or URL.match(resume):
        return name
    return f"{name}#{hashlib.sha256(resume.encode(errors='replace')).hexdigest()[:4]}"


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as snapshots store it, without folders."""
    public = {name: dict(part) if isinstance(part, dict) else part for name, part in config.items()}
    for (section, key), shorten in PUBLIC.items():
        part = public.get(section)
        if isinstance(part, dict) and isinstance(part.get(key), str):
            part[key] = shorten(part[key])
    mix = public["data"]["mix"]
    public["data"]["mix"] = [{**part, "source": public_name(str(part["source"]))} for part in mix]
    return public


def _last_part(folder: str) -> str:
    return PurePath(folder).name or "."


PUBLIC = {
    ("run", "dir"): _last_part,
    ("data", "cache_dir"): _last_part,
    ("data", "source"): public_name,
    ("data", "tokenizer"): public_name,
    ("model", "pretrained"): public_name,
    ("model", "architecture"): public_name,
    ("snapshot", "resume"): public_resume,
    ("hub", "url"): public_resume,
}
"""By key whose value may be a path, the function that removes its folders."""
