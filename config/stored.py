"""The configuration as files and snapshots store it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.printable import redact_urls
from config.schema import Config
from data.public_names import public_config

NO_CONFIG = (OSError, ValueError, KeyError, TypeError, OmegaConfBaseException)
"""Raised for a file that is missing, or that no run has written."""


def with_folders(stored: dict[str, Any], path: Path) -> dict[str, Any]:
    """A snapshot's configuration with the folders of its text, which its run's config.yaml has.

    Without them if that file names other sources, or cannot be read.
    """
    try:
        own: Any = OmegaConf.to_container(OmegaConf.load(path))
        public = public_config(own)["data"]
        named = [key for key in ("source", "mix") if stored["data"][key] == public[key]]
        return {**stored, "data": {**stored["data"], **{key: own["data"][key] for key in named}}}
    except NO_CONFIG:
        return stored


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
