"""Checks of a configuration that are independent of the machine; all mistakes at once."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path

from common.printable import printable, redact_urls
from config.problems import Problems, is_storable, value_of, why_not_storable
from config.schema import TEXT_KEYS, Config, ModelConfig, is_preset, other_model, tokenizer_of
from data.columns import CONVERSATIONS, DOCUMENT_MODES, MASKED, PACKED
from data.order import WHOLE, shares_of
from data.reading.groups import TRAIN
from data.sources import BUILT_IN
from data.tokenizer import CHARACTERS, LARGEST_BPE, OF_BYTES, SMALLEST_BPE, bpe_size
from model.attention import CPU_WAYS, KERNELS
from model.families import ARCHITECTURES
from model.frozen import AUTO, KINDS, NF4
from model.gpt import ACTIVATIONS
from model.recompute import WAYS as RECOMPUTE
from optim.optimizers import OPTIMIZERS, refusal
from optim.schedules import SCHEDULES

MOST = 1_000_000_000
RANGES = {
    "data.block_size": (1, 1_000_000),
    "data.window_bytes": (1_000, 10**12),
    "data.prefetch_bytes": (1_000, 10**12),
    "data.stream_cache_bytes": (1_000, 10**15),
    "data.held_out_bytes": (1_000, 10**12),
    "model.n_layer": (1, 10_000),
    "model.n_head": (1, 10_000),
    "model.n_embd": (1, 1_000_000),
    "model.lora_rank": (1, 65_536),
    "model.lora_alpha": (1, 65_536),
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
    "hub.milestone_every": (1, MOST),
    "run.collective_timeout_seconds": (1, 1_000_000),
    "run.start_timeout_seconds": (1, 1_000_000),
}
"""Minimum and maximum of each whole number. The maximum is far above any use: a larger value is a
typing error that would exhaust the memory, overflow a clock or never end."""
REMARKS = {
    "train.micro_batch_size": ", or null",
    "train.eval_batches": ", or null for the whole held-out text",
    "snapshot.keep": ", in case the newest is damaged",
}
NEVER_EMPTY = (
    "data.source",
    "data.tokenizer",
    "data.cache_dir",
    "model.pretrained",
    "model.architecture",
    "snapshot.resume",
    "run.name",
    "run.dir",
)
"""Keys whose text is, or may be, a path."""
PART_BYTES, PATH_BYTES = 255, 3_900
"""Limits of file systems for a name and of the system for a path, minus a run's own files."""
CARD_FIELDS = {
    "hub.license": "must be a license identifier of the Hub, such as mit or apache-2.0, or null",
    "hub.language": "must be a language code, such as en or de, or null",
}
CHOICES: dict[str, Collection[bool | str]] = {
    "data.documents": DOCUMENT_MODES,
    "model.activation_function": tuple(ACTIVATIONS),
    "model.frozen_dtype": KINDS,
    "model.activation_checkpointing": RECOMPUTE,
    "optim.name": OPTIMIZERS,
    "optim.schedule": SCHEDULES,
    "run.attention": ("auto", *CPU_WAYS, *KERNELS),
    "run.reduce_dtype": ("float32", "bf16"),
}
"""The allowed values of a key."""
WORD = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
TOO_LONG = f"is too long: at most {PART_BYTES} bytes for a name, {PATH_BYTES} for a path"


def problems(config: Config) -> list[str]:
    """One sentence for each mistake in the values, independent of the machine."""
    found = Problems(config)
    _check_ranges(found)
    _check_texts(found)
    _check_data_and_model(found)
    check_streaming(found)
    _check_what_is_trained(found)
    _check_optimizer(found)
    _check_hub_and_run(found)
    return found.sentences


def _check_ranges(found: Problems) -> None:
    for key, (least, most) in RANGES.items():
        number, remark = value_of(found.config, key), REMARKS.get(key, "")
        found.need(number is None or number >= least, key, f"must be at least {least}{remark}")
        found.need(number is None or number <= most, key, f"must be at most {most}{remark}")


def _check_texts(found: Problems) -> None:
    need = found.need
    for key in TEXT_KEYS:
        text = value_of(found.config, key)
        if text is None or (key == "run.dir" and text == f"out/{found.config.run.name}"):
            continue  # derived from run.name, which is checked itself
        if not is_storable(text):
            need(False, key, why_not_storable(text))
        if key in NEVER_EMPTY:
            need(text.strip() != "", key, "is empty. Leave it out for its default")
            need("://" in text or _is_path(text), key, TOO_LONG)
        if key in NEVER_EMPTY and key != "run.name":
            here = Path.cwd() / text  # ./~ is ~ for pathlib
            need(_has_home(text), key, f"names the home of an unknown user: write {here}")
        if key in ("data.cache_dir", "run.name", "run.dir"):
            need(printable(text) == text, key, "has control characters. Use another name")
    for key, choices in CHOICES.items():
        *most, last = (str(one).lower() if isinstance(one, bool) else one for one in choices)
        valid = value_of(found.config, key) in choices
        need(valid, key, f"must be {', '.join(most)} or {last}")


def _check_data_and_model(found: Problems) -> None:
    need, data, model = found.need, found.config.data, found.config.model
    need(0 < data.val_fraction <= 0.5, "data.val_fraction", "must be above 0 and at most 0.5")
    need(
        model.pretrained is None or model.architecture in (None, *ARCHITECTURES),
        "model.architecture",
        f"and model.pretrained={model.pretrained} name two models. Leave one of them out",
    )
    tokenizer = data.tokenizer or ""
    is_trained = tokenizer.partition(":")[0].lower() == "bpe"
    need(
        model.pretrained is None or not (is_trained or tokenizer == CHARACTERS),
        "data.tokenizer",
        f"cannot replace the tokenizer that model.pretrained={model.pretrained} was trained with. "
        "Leave it out",
    )
    own = tokenizer in ("", CHARACTERS) and tokenizer_of(model) == CHARACTERS
    need(
        data.documents != CONVERSATIONS or not (own or is_trained),
        "data.documents",
        "needs a tokenizer with a chat template. Set model.pretrained to a chat model, or "
        "data.tokenizer to its repo or folder",
    )
    if is_trained:
        size = bpe_size(tokenizer)
        need(
            size is not None and SMALLEST_BPE <= size <= LARGEST_BPE,
            "data.tokenizer",
            f"must be bpe:<size> with a size from {SMALLEST_BPE} (256 bytes and the end-of-text "
            f"token) to {LARGEST_BPE}, such as bpe:8000",
        )
    need(0 <= model.dropout < 1, "model.dropout", "must be at least 0 and below 1")
    if model.n_head >= 1 and 1 <= model.n_embd <= RANGES["model.n_embd"][1]:
        is_multiple = model.n_embd % model.n_head == 0
        need(is_multiple, "model.n_embd", "" if is_multiple else _nearest_heads(model))


def _nearest_heads(model: ModelConfig) -> str:
    """The problem of a width that is no multiple of the heads, and what would be."""
    width, heads = model.n_embd, model.n_head
    near = sorted({max(1, width // heads), width // heads + 1})
    divisors = [count for count in range(1, width + 1) if width % count == 0]
    few = max(count for count in divisors if count <= heads or count == 1)
    many = min(count for count in divisors if count >= heads or count == width)
    return (
        f"is not a multiple of model.n_head={heads}. "
        f"The nearest: {' or '.join(str(count * heads) for count in near)}; or "
        f"model.n_head={few} or {many}"
    )


def _check_what_is_trained(found: Problems) -> None:
    need, config = found.need, found.config
    model = config.model
    if model.lora_rank is not None:
        named = "needs model.pretrained, the model to add adapters to. Set it as well"
        need(model.pretrained is not None, "model.lora_rank", named)
        others = f"has no effect: with model.lora_rank={model.lora_rank} only adapters are trained"
        others += ". Leave it out"
        need(not config.optim.freeze, "optim.freeze", others)
    else:
        needs_rank = "applies only to LoRA. Set model.lora_rank, such as 8, as well"
        need(model.lora_alpha is None, "model.lora_alpha", needs_rank)
        need(not model.lora_targets, "model.lora_targets", needs_rank)
        is_frozen = model.frozen_dtype == AUTO or bool(config.optim.freeze)
        what = "has no effect: nothing is frozen. Set model.lora_rank or optim.freeze, or leave it"
        need(is_frozen, "model.frozen_dtype", f"{what} out")
        what = "needs adapters, because snapshots hold other frozen weights. Set model.lora_rank"
        need(model.frozen_dtype != NF4, "model.frozen_dtype", what)


def _check_optimizer(found: Problems) -> None:
    need, optim = found.need, found.config.optim
    model = found.config.model
    has_rate_by_size = other_model(model) is not None and not is_preset(model)
    by_size = optim.learning_rate == 0 and has_rate_by_size
    rate_is_valid = by_size or 0 < optim.learning_rate < math.inf
    need(rate_is_valid, "optim.learning_rate", "must be above 0 and finite")
    highest = math.inf if by_size else optim.learning_rate
    need(
        not rate_is_valid or 0 <= optim.min_learning_rate <= highest,
        "optim.min_learning_rate",
        f"must be between 0 and optim.learning_rate={optim.learning_rate}",
    )
    need(0 < optim.decay_fraction <= 1, "optim.decay_fraction", "must be above 0 and at most 1")
    need(0 <= optim.weight_decay < math.inf, "optim.weight_decay", "must be at least 0, and finite")
    need(
        len(optim.betas) == 2 and all(map(_is_beta, optim.betas)),
        "optim.betas",
        "must be two numbers, each at least 0 and below 1",
    )
    need(optim.max_grad_norm > 0, "optim.max_grad_norm", "must be above 0")
    if optim.name in OPTIMIZERS and not any("optim." in sentence for sentence in found.sentences):
        reason = refusal(optim.name, optim)
        need(reason is None, "optim.name", f"cannot be used: it {reason}")


def _check_hub_and_run(found: Problems) -> None:
    need, hub, run = found.need, found.config.hub, found.config.run
    if hub.repo_id is not None:
        need(_is_repo_id(hub.repo_id), "hub.repo_id", "must have the form owner/name")
    if hub.url is not None:
        need(hub.repo_id is None, "hub.url", f"excludes hub.repo_id={hub.repo_id}: leave one out")
        reason = _why_no_store(hub.url)
        need(reason is None, "hub.url", reason or "")
    every, milestone = found.config.snapshot.every, hub.milestone_every
    minutes = found.config.snapshot.every_minutes
    if milestone is not None and minutes is None and every >= 1:
        near = sorted({max(1, milestone // every) * every, (milestone // every + 1) * every})
        need(
            milestone % every == 0,
            "hub.milestone_every",
            f"is not a multiple of snapshot.every={every}: only a snapshot can be a milestone. The "
            f"nearest: {' or '.join(map(str, near))}",
        )
    need(
        minutes is None or 0 < minutes < 1e6,
        "snapshot.every_minutes",
        "must be above 0 and below 1000000, or null",
    )
    for key, rule in CARD_FIELDS.items():
        need(WORD.fullmatch(getattr(hub, key[4:]) or "none") is not None, key, rule)
    for key in ("hub.min_interval_seconds", "hub.flush_seconds"):
        need(0 <= getattr(hub, key[4:]) < 1e6, key, "must be at least 0 and below 1000000")
    need(0 < hub.timeout_seconds < 1e6, "hub.timeout_seconds", "must be above 0 and below 1000000")
    need(1 <= run.grace_seconds < 1e6, "run.grace_seconds", "must be at least 1 and below 1000000")
    need(
        run.max_minutes is None or run.grace_seconds < 60 * run.max_minutes < 1e9,
        "run.max_minutes",
        f"must be more than {run.grace_seconds / 60:.3g}, or null: "
        f"run.grace_seconds={run.grace_seconds:g} is reserved for the last snapshot",
    )


def _why_no_store(url: str) -> str | None:
    """Why a URL cannot be a store; None if it can."""
    scheme, mark, place = url.partition("://")
    if not mark or not place.strip("/") or scheme in ("http", "https"):
        return "must be the URL of a folder that can be written, such as s3://bucket/run"
    if scheme == "hf":
        name = place.removeprefix("buckets/")
        if place != name:  # a bucket, or a folder in it
            name = "/".join(name.rstrip("/").split("/")[:2])
        return None if _is_repo_id(name) else "must have the form hf://buckets/owner/name"
    if redact_urls(url) != url:
        return "must hold no user, password or query: set them in the environment"
    return None


def _is_beta(beta: object) -> bool:
    return isinstance(beta, int | float) and 0 <= beta < 1  # OmegaConf accepts lists of lists


def _is_path(text: str) -> bool:
    """Whether a text is short enough for a path."""
    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in text.split("/")]
    return max(sizes) <= PART_BYTES and sum(sizes) + len(sizes) <= PATH_BYTES


def _has_home(path: str) -> bool:
    """Whether the user is known, if a path begins with `~user`."""
    try:
        Path(path).expanduser()
    except RuntimeError:
        return False
    return True


def _is_repo_id(name: str) -> bool:
    from huggingface_hub.utils import (  # a slow import, only if needed
        HFValidationError,
        validate_repo_id,
    )

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def is_streamed(config: Config) -> bool:
    """Whether the text is read during training instead of before it."""
    return bool(config.data.streaming or config.data.mix)


def check_streaming(found: Problems) -> None:
    """Add a sentence for each value that does not work with a streamed text."""
    need, data = found.need, found.config.data
    rule = "cannot be used with data.mix, which is always streamed. Leave one of them out"
    need(data.streaming is not False or not data.mix, "data.streaming", rule)
    for number, part in enumerate(data.mix):
        key = f"data.mix[{number}]"
        if not is_storable(part.source):
            found.sentences.append(f"{key}.source {why_not_storable(part.source)}.")
        if not part.source.strip():
            found.sentences.append(f"{key}.source is empty. Name a file or a data set.")
        if not 0 < part.weight < math.inf:
            found.sentences.append(f"{key}.weight={part.weight} must be above 0 and finite.")
    if data.mix and all(0 < part.weight < math.inf for part in data.mix):
        for number, share in enumerate(shares_of([part.weight for part in data.mix])):
            if share == 0:
                found.sentences.append(
                    f"data.mix[{number}].weight={data.mix[number].weight} is less than "
                    f"1/{WHOLE:,} of the sum of weights. Raise it, or leave the source out."
                )
    split = data.held_out_split
    need(split != TRAIN, "data.held_out_split", "is the split to train on. Name another one")
    if not is_streamed(found.config):
        rule = "applies only to streamed data sets. Set data.streaming=true, or leave it out"
        need(split is None, "data.held_out_split", rule)
        return
    need(
        bool(data.mix) or data.source not in BUILT_IN,
        "data.streaming",
        f"is not possible for data.source={data.source}, a text that comes with Python. Leave it "
        "out, or name a data set",
    )
    need(
        data.documents in (PACKED, MASKED),
        "data.documents",
        f"is not possible for streamed text: use {PACKED} or {MASKED}, or prepare "
        "the text with data.streaming=false",
    )
    name = data.tokenizer or tokenizer_of(found.config.model)
    need(
        name == OF_BYTES or (name != CHARACTERS and bpe_size(name) is None),
        "data.tokenizer",
        f"{'(characters) ' * (data.tokenizer is None)}needs the whole text beforehand, which "
        "streaming does not read. Name a repo or folder "
        f"with a tokenizer, such as data.tokenizer=gpt2, or {OF_BYTES}, whose tokens are bytes",
    )
    least = data.window_bytes * max(1, len(data.mix))
    rule = f"must be at least {least}: data.window_bytes for each source"
    need(data.prefetch_bytes >= least, "data.prefetch_bytes", rule)
    least = 4 * data.prefetch_bytes
    rule = f"must be at least {least}: 4 times data.prefetch_bytes"
    need(data.stream_cache_bytes >= least, "data.stream_cache_bytes", rule)
