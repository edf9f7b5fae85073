"""The configuration as files and snapshots store it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.printable import redact_urls
from config.schema import Config
from data.public_names import public_config

FOLDERS_OF_TEXT = ("source", "mix")
"""Keys of `data` whose values may be folders of a machine."""
LARGEST_BYTES = 1 << 20
"""The largest config.yaml that is read, in bytes."""


def with_folders(stored: dict[str, Any], path: Path) -> dict[str, Any]:
    """The configuration of a snapshot, with the folders of its text added from the file at `path`.

    That file is config.yaml in the run's directory. It keeps folders, because it is not uploaded.
    Nothing changes where it names other sources, or does not exist.
    """
    here: Any = {}
    with suppress(OSError, ValueError, OmegaConfBaseException):
        if path.stat().st_size <= LARGEST_BYTES:
            here = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(here, dict):
        return stored
    parts = (public_config(here), stored, here)
    public, was, own = (part.get("data") for part in parts)
    if not (isinstance(public, dict) and isinstance(was, dict) and isinstance(own, dict)):
        return stored
    same = [key for key in FOLDERS_OF_TEXT if key in was and was[key] == public.get(key, ...)]
    return {**stored, "data": {**stored["data"], **{key: own[key] for key in same}}}


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
