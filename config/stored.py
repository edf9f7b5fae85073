"""A configuration as files and snapshots hold it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.schema import Config
from data.printable import redact_urls
from data.public_names import public_config

LARGEST_BYTES = 1 << 20
"""The largest config.yaml that is read, in bytes."""


def with_folders(stored: dict[str, Any], path: Path) -> dict[str, Any]:
    """A snapshot's configuration, with the places of its text as the file at `path` has them.

    That is the config.yaml of the run's directory, which says where things lie and is not uploaded.
    Sources that are others there, or a file that is not there, change nothing.
    """
    here: Any = {}
    with suppress(OSError, ValueError, OmegaConfBaseException):
        if path.stat().st_size <= LARGEST_BYTES:
            here = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(here, dict) or not isinstance(here.get("data"), dict):
        return stored
    known = public_config({"data": here["data"]})["data"]
    data = stored.get("data")
    before = public_config({"data": data})["data"] if isinstance(data, dict) else {}
    same = [name for name in ("source", "mix") if name in before and name in known]
    same = [name for name in same if before[name] == known[name]]
    return {**stored, "data": {**(data or {}), **{name: here["data"][name] for name in same}}}


def as_yaml(config: Config) -> str:
    """The resolved configuration as YAML, without the secrets of a URL."""
    return OmegaConf.to_yaml(_public(config))


def as_plain(config: Config) -> dict[str, Any]:
    """The resolved configuration as dictionaries and lists, as snapshots hold it.

    Without the secrets of a URL and without the folders of this machine.
    """
    plain = OmegaConf.to_container(_public(config))
    assert isinstance(plain, dict)
    return public_config({str(key): value for key, value in plain.items()})


def _public(config: Config) -> DictConfig:
    """The configuration without secrets, which may be stored, shown and uploaded."""
    mix = [replace(part, source=redact_urls(part.source)) for part in config.data.mix]
    data = replace(config.data, source=redact_urls(config.data.source), mix=mix)
    return OmegaConf.structured(replace(config, data=data))
