"""What is wrong with a configuration, whatever the machine: all of it at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from config.schema import TEXT_KEYS, Config
from data.printable import printable
from model.gpt import ACTIVATIONS

MOST = 1_000_000_000
RANGES = {
    "data.block_size": (1, 1_000_000),
    "data.num_workers": (0, 1_000),
    "model.n_layer": (1, 10_000),
    "model.n_head": (1, 10_000),
    "model.n_embd": (1, 1_000_000),
    "optim.warmup_steps": (0, MOST),
    "train.max_steps": (1, MOST),
    "train.global_batch_size": (1, 1_000_000),
    "train.micro_batch_size": (1, 1_000_000),
    "train.eval_every": (1, MOST),
    "train.eval_batches": (1, MOST),
    "train.log_every": (1, MOST),
    "train.sample_every": (0, MOST),
    "train.max_skipped_steps": (0, MOST),
    "train.seed": (0, 2**32 - 1),
    "snapshot.every": (1, MOST),
    "snapshot.keep": (2, 1_000_000),
    "snapshot.piece_bytes": (1_000_000, 10**15),
    "hub.keep": (1, 1_000_000),
    "hub.squash_every": (1, MOST),
    "run.collective_timeout_seconds": (1, 1_000_000),
    "run.start_timeout_seconds": (1, 1_000_000),
}
"""By key of a whole number: the least and the most, far above any use. What is larger is a slip of
the finger, and would end in a failure of memory or of a clock, or in no end at all."""
REMARKS = {
    "train.micro_batch_size": ", or null",
    "train.eval_batches": ", or null for the whole held-out text",
    "snapshot.keep": ": one is the other's spare",
}
NEVER_EMPTY = ("data.source", "data.cache_dir", "snapshot.resume", "run.name", "run.dir")
"""Texts that become paths, or may."""
PART_BYTES, PATH_BYTES = 255, 3_900
"""File systems take no longer names, nor the system longer paths; a run's own files come below."""
TOO_LONG = f"is too long: a name has {PART_BYTES} bytes at most, and a path {PATH_BYTES}"


def problems(config: Config) -> list[str]:
    """Everything that is wrong with the values, a sentence each, whatever the machine."""
    found: list[str] = []

    def need(holds: bool, key: str, rule: str) -> None:
        if not holds:
            found.append(f"{key}={_short(_value(config, key))} {rule}.")

    for key, (least, most) in RANGES.items():
        number, remark = _value(config, key), REMARKS.get(key, "")
        need(number is None or number >= least, key, f"must be at least {least}{remark}")
        need(number is None or number <= most, key, f"must be at most {most}{remark}")
    for key in TEXT_KEYS:
        text = _value(config, key)
        if text is None or (key == "run.dir" and text == f"out/{config.run.name}"):
            continue  # made from run.name, whose mistakes it has
        need(is_storable(text), key, "has bytes that are no text in UTF-8")
        if key in NEVER_EMPTY:
            need(text.strip() != "", key, "is empty")
            need("://" in text or _is_path(text), key, TOO_LONG)
        if key in NEVER_EMPTY and key != "run.name":
            need(_has_home(text), key, f"names the home of a user who is not here: write ./{text}")
        if key in ("data.cache_dir", "run.name", "run.dir"):
            need(printable(text) == text, key, "has control characters: a terminal may act on them")
    data, model, optim = config.data, config.model, config.optim
    need(0 < data.val_fraction <= 0.5, "data.val_fraction", "must be above 0 and at most 0.5")
    need(0 <= model.dropout < 1, "model.dropout", "must be at least 0 and below 1")
    need(
        model.activation_function in ACTIVATIONS,
        "model.activation_function",
        f"must be {' or '.join(ACTIVATIONS)}",
    )
    if model.n_head >= 1 and 1 <= model.n_embd <= RANGES["model.n_embd"][1]:
        near = sorted({max(1, model.n_embd // model.n_head), model.n_embd // model.n_head + 1})
        need(
            model.n_embd % model.n_head == 0,
            "model.n_embd",
            f"is not a multiple of model.n_head={model.n_head}. "
            f"The nearest: {' or '.join(str(count * model.n_head) for count in near)}",
        )
    rate_is_sound = 0 < optim.learning_rate < math.inf
    need(rate_is_sound, "optim.learning_rate", "must be above 0 and finite")
    need(
        not rate_is_sound or 0 <= optim.min_learning_rate <= optim.learning_rate,
        "optim.min_learning_rate",
        f"must be between 0 and optim.learning_rate={optim.learning_rate}",
    )
    need(0 <= optim.weight_decay < math.inf, "optim.weight_decay", "must not be negative")
    need(
        len(optim.betas) == 2 and all(map(_is_share, optim.betas)),
        "optim.betas",
        "must be two numbers, each at least 0 and below 1",
    )
    need(optim.max_grad_norm > 0, "optim.max_grad_norm", "must be above 0")
    hub = config.hub
    if hub.repo_id is not None:
        need(_is_repo_id(hub.repo_id), "hub.repo_id", "is not of the form owner/name")
    for key in ("hub.min_interval_seconds", "hub.flush_seconds"):
        need(0 <= getattr(hub, key[4:]) < 1e6, key, "must be at least 0, and below 1000000")
    need(0 < hub.timeout_seconds < 1e6, "hub.timeout_seconds", "must be above 0, below 1000000")
    run = config.run
    need(1 <= run.grace_seconds < 1e6, "run.grace_seconds", "must be at least 1, below 1000000")
    need(
        run.max_minutes is None or run.grace_seconds < 60 * run.max_minutes < 1e9,
        "run.max_minutes",
        f"must be more than run.grace_seconds={run.grace_seconds:g}, which are kept for the end of "
        "it, or null",
    )
    return found


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _short(value: object) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def _is_share(beta: object) -> bool:
    return isinstance(beta, int | float) and 0 <= beta < 1  # OmegaConf lets lists of lists through


def is_storable(text: str) -> bool:
    """Whether JSON, YAML and file names take it."""
    try:
        return "\0" not in text and text.encode("utf-8") is not None
    except UnicodeEncodeError:  # broken bytes of the command line are lone surrogates
        return False


def _is_path(text: str) -> bool:
    """Whether no file system finds it too long."""
    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in text.split("/")]
    return max(sizes) <= PART_BYTES and sum(sizes) + len(sizes) <= PATH_BYTES


def _has_home(path: str) -> bool:
    """Whether the user of `~user` is known, where a path begins so."""
    try:
        Path(path).expanduser()
    except RuntimeError:
        return False
    return True


def _is_repo_id(name: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id  # only where it is used

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name
