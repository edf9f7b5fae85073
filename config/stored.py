"""The configuration as files and snapshots store it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.schema import Config
from data.printable import redact_urls
from data.public_names import public_config

FOLDERS_OF_TEXT = {"data": ("source", "mix")}
EVERY_FOLDER = {
    "data": ("source", "mix", "tokenizer", "cache_dir"),
    "model": ("pretrained", "architecture"),
}
"""Keys whose values may be folders of a machine, by section."""
LARGEST_BYTES = 1 << 20
"""The largest config.yaml that is read, in bytes."""


def with_folders(stored: dict[str, Any], path: Path, every: bool = False) -> dict[str, Any]:
    """The configuration of a snapshot, with the folders of its text added from the file at `path`.

    With `every`, also those of its tokenizer, its model and the prepared texts. That file is
    config.yaml in the run's directory. It keeps folders, because it is not uploaded.
    Nothing changes where it names other sources, or does not exist.
    """
    here: Any = {}
    with suppress(OSError, ValueError, OmegaConfBaseException):
        if path.stat().st_size <= LARGEST_BYTES:
            here = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(here, dict):
        return stored
    known, before, found = public_config(here), public_config(stored), dict(stored)
    for section, names in (EVERY_FOLDER if every else FOLDERS_OF_TEXT).items():
        public, was, own = (one.get(section) for one in (known, before, here))
        if not (isinstance(public, dict) and isinstance(was, dict) and isinstance(own, dict)):
            continue
        same = [one for one in names if one in was and one in public and was[one] == public[one]]
        found[section] = {**found[section], **{name: own[name] for name in same}}
    return found


def as_yaml(config: Config) -> str:
    """The resolved configuration as YAML, without the secrets of a URL."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(_public(config))))


def as_plain(config: Config) -> dict[str, Any]:
    """The resolved configuration as dictionaries and lists, as snapshots hold it.

    Without the secrets of a URL and without the folders of this machine.
    """
    return public_config(asdict(_public(config)))


def _public(config: Config) -> Config:
    """The configuration without secrets, safe to store, show and upload."""
    mix = [replace(part, source=redact_urls(part.source)) for part in config.data.mix]
    data = replace(config.data, source=redact_urls(config.data.source), mix=mix)
    return replace(config, data=data)
