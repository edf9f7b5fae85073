"""The configuration as files and snapshots store it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from common.printable import redact_urls
from config.schema import Config
from data.public_names import public_config

CONFIG_FILE = "config.yaml"
SECTIONS = {"data", "model", "optim", "train", "snapshot", "run"}
"""Sections of the configuration since its first version."""
LARGEST_BYTES = 1 << 20


def read_config(path: Path) -> dict[str, Any] | None:
    """The configuration that a run has written to a file; None if it is missing or any other."""
    with suppress(Exception):  # unrelated types: it may be any file
        if path.stat().st_size <= LARGEST_BYTES:
            content = OmegaConf.to_container(OmegaConf.load(path))
            if isinstance(content, dict) and content.keys() >= SECTIONS:
                return {str(key): value for key, value in content.items()}
    return None


def as_yaml(config: Config) -> str:
    """The resolved configuration as YAML, without the secrets of a URL."""
    mix = [replace(part, source=redact_urls(part.source)) for part in config.data.mix]
    data = replace(config.data, source=redact_urls(config.data.source), mix=mix)
    return OmegaConf.to_yaml(OmegaConf.create(asdict(replace(config, data=data))))


def as_plain(config: Config) -> dict[str, Any]:
    """The resolved configuration as dictionaries and lists, as snapshots hold it.

    Without the secrets of a URL and without the folders of this machine.
    """
    return public_config(asdict(config))
