"""What is wrong with a configuration, whatever the machine: all of it at once."""

from __future__ import annotations

import math

from model.gpt import ACTIVATIONS
from training.config import Config

COUNTS = (
    "data.block_size",
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "train.max_steps",
    "train.global_batch_size",
    "train.eval_every",
    "train.log_every",
    "snapshot.every",
    "hub.keep",
    "hub.squash_every",
    "run.collective_timeout_seconds",
    "run.start_timeout_seconds",
)
"""Keys whose value is at least 1."""
MOST = {
    "data.block_size": 1_000_000,
    "train.max_steps": 1_000_000_000,
    "train.global_batch_size": 1_000_000,
    "run.collective_timeout_seconds": 1_000_000,
    "run.start_timeout_seconds": 1_000_000,
}
"""Larger values are slips of the finger, and would end in a failure of memory or of a clock."""


def problems(config: Config) -> list[str]:
    """Everything that is wrong with the values, a sentence each, whatever the machine."""
    found: list[str] = []

    def need(holds: bool, key: str, rule: str) -> None:
        if not holds:
            section, name = key.split(".")
            value = getattr(getattr(config, section), name)
            found.append(f"{key}={'null' if value is None else value} {rule}.")

    for key in COUNTS:
        section, name = key.split(".")
        need(getattr(getattr(config, section), name) >= 1, key, "must be at least 1")
    for key, most in MOST.items():
        section, name = key.split(".")
        need(getattr(getattr(config, section), name) <= most, key, f"must be at most {most}")
    for key in ("data.source", "data.cache_dir", "snapshot.resume", "run.name", "run.dir"):
        section, name = key.split(".")
        need(getattr(getattr(config, section), name).strip() != "", key, "is empty")
    data, model, optim, train = config.data, config.model, config.optim, config.train
    need(0 < data.val_fraction <= 0.5, "data.val_fraction", "must be above 0 and at most 0.5")
    need(data.num_workers >= 0, "data.num_workers", "must not be negative")
    need(0 <= model.dropout < 1, "model.dropout", "must be at least 0 and below 1")
    need(
        model.activation_function in ACTIVATIONS,
        "model.activation_function",
        f"must be {' or '.join(ACTIVATIONS)}",
    )
    if model.n_head >= 1 and model.n_embd >= 1:
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
    need(optim.warmup_steps >= 0, "optim.warmup_steps", "must not be negative")
    need(0 <= optim.weight_decay < math.inf, "optim.weight_decay", "must not be negative")
    need(
        len(optim.betas) == 2 and all(0 <= beta < 1 for beta in optim.betas),
        "optim.betas",
        "must be two numbers, each at least 0 and below 1",
    )
    need(optim.max_grad_norm > 0, "optim.max_grad_norm", "must be above 0")
    need(
        train.micro_batch_size is None or train.micro_batch_size >= 1,
        "train.micro_batch_size",
        "must be at least 1, or null",
    )
    need(
        train.eval_batches is None or train.eval_batches >= 1,
        "train.eval_batches",
        "must be at least 1, or null for the whole held-out text",
    )
    need(train.sample_every >= 0, "train.sample_every", "must not be negative")
    need(train.max_skipped_steps >= 0, "train.max_skipped_steps", "must not be negative")
    need(0 <= train.seed < 2**32, "train.seed", "must be between 0 and 4294967295")
    need(config.snapshot.keep >= 2, "snapshot.keep", "must be at least 2: one is the other's spare")
    need(
        config.snapshot.piece_bytes >= 1_000_000,
        "snapshot.piece_bytes",
        "must be at least 1000000 (1 MB)",
    )
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


def _is_repo_id(name: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id  # only where it is used

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name
