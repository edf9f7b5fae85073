"""Checks of a configuration that are independent of the machine; all mistakes at once.

The ranges of the schema, `CHOICES` and `PATTERNS` are about one key each. `RULES` are about
several; each yields the key to blame, and the rest of a sentence that begins with `key=value`.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Iterator
from typing import Any

from common.printable import printable, redact_urls, shortened
from config.schema import (
    KEYS,
    RANGES,
    TEXT_KEYS,
    Config,
    is_preset,
    is_streamed,
    multiples_near,
    other_model,
    tokenizer_of,
)
from data.columns import CONVERSATIONS, DOCUMENT_MODES, MASKED, PACKED
from data.order import WHOLE
from data.reading.groups import TRAIN
from data.tokenizer import CHARACTERS, LARGEST_BPE, OF_BYTES, SMALLEST_BPE, bpe_size
from model.families import ARCHITECTURES
from model.frozen import AUTO, KINDS, NF4
from model.gpt import ACTIVATIONS
from optim.optimizers import OPTIMIZERS
from optim.schedules import SCHEDULES

Mistakes = Iterator[tuple[str, str]]
"""Keys, each with the rest of the sentence."""
CHOICES: dict[str, Collection[str]] = {
    "data.documents": DOCUMENT_MODES,
    "model.activation_function": tuple(ACTIVATIONS),
    "model.frozen_dtype": KINDS,
    "optim.name": OPTIMIZERS,
    "optim.schedule": SCHEDULES,
}
"""The allowed values of a key."""
WORD = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
REPO = r"(?!.*(--|\.\.|\.git$))\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b"
PATTERNS = {
    "hub.license": (WORD, "be a license identifier of the Hub, such as mit or apache-2.0"),
    "hub.language": (WORD, "be a language code, such as en or de"),
    "hub.repo_id": (re.compile(REPO), "have the form owner/name"),
}
"""The form of a text, and what it is."""
PATHS = (
    *("data.source", "data.tokenizer", "data.cache_dir", "model.pretrained", "model.architecture"),
    *("snapshot.resume", "run.name", "run.dir"),
)
"""Keys whose text is, or may be, a path."""
LONGEST_NAME = 255
"""Bytes of the name of a file or a folder."""


def problems(config: Config) -> list[str]:
    """One sentence for each key with a wrong value, independent of the machine."""
    mistakes: dict[str, str] = {}
    for rules in RULES:
        for key, rule in rules(config):
            mistakes.setdefault(key, rule)  # what follows from a mistake is none of its own
    return [f"{key}={_shown(value_of(config, key))} {rule}." for key, rule in mistakes.items()]


def value_of(config: Any, key: str) -> Any:
    """The value of a key such as data.source."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _shown(value: Any) -> str:
    is_written_otherwise = value is None or isinstance(value, bool | list)
    return shortened(json.dumps(value, default=vars) if is_written_otherwise else str(value))


def _single_keys(config: Config) -> Mistakes:
    for key, (least, most) in RANGES.items():
        value, or_null = value_of(config, key), ", or null" * KEYS[key].endswith("None")
        if value is not None and not least <= value <= most:  # nan is in no range
            yield key, f"must be between {least} and {most}{or_null}"
    for key, choices in CHOICES.items():
        *others, last = choices
        if value_of(config, key) not in choices:
            yield key, f"must be {', '.join(others)} or {last}"
    for key in TEXT_KEYS:
        text = value_of(config, key)
        if text is None or (key == "run.dir" and text == f"out/{config.run.name}"):
            continue  # derived from run.name, which is checked itself
        if key in PATTERNS and not PATTERNS[key][0].fullmatch(text):
            yield key, f"must {PATTERNS[key][1]}, or null"
        if (reason := why_not_storable(text)) is not None:
            yield key, reason
        if key not in PATHS:
            continue
        if not text.strip():
            yield key, "is empty. Leave it out for its default"
        names = [] if "://" in text else text.split("/")
        if any(len(name.encode(errors="replace")) > LONGEST_NAME for name in names):
            yield key, f"has a name of more than {LONGEST_NAME} bytes. Use a shorter one"


def why_not_storable(text: str) -> str | None:
    """Why a text cannot stand in JSON, YAML and file names, and the remedy; None if it can."""
    if printable(text) == text:
        return None
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and not text.isascii():
        what = f"has characters that the encoding of this locale, {encoding}, lacks"
        return f"{what}: set PYTHONUTF8=1 in the environment"
    return "has control characters, or bytes that are not valid UTF-8. Use another name"


def _model_and_tokenizer(config: Config) -> Mistakes:
    data, model = config.data, config.model
    if model.pretrained is not None and model.architecture not in (None, *ARCHITECTURES):
        two = f"and model.pretrained={model.pretrained} name two models. Leave one of them out"
        yield "model.architecture", two
    tokenizer = data.tokenizer or ""
    is_bpe = tokenizer.partition(":")[0].lower() == "bpe"
    is_of_this_text = is_bpe or tokenizer == CHARACTERS
    if model.pretrained is not None and is_of_this_text:
        own = f"that of model.pretrained={model.pretrained}. Leave it out"
        yield "data.tokenizer", f"cannot replace {own}"
    has_no_chats = is_of_this_text or (not tokenizer and tokenizer_of(model) == CHARACTERS)
    if data.documents == CONVERSATIONS and has_no_chats:
        remedy = "Set model.pretrained or data.tokenizer to a chat model"
        yield "data.documents", f"needs a tokenizer with a chat template. {remedy}"
    if is_bpe and (bpe_size(tokenizer) or 0) not in range(SMALLEST_BPE, LARGEST_BPE + 1):
        sizes = f"a size from {SMALLEST_BPE} to {LARGEST_BPE}"
        yield "data.tokenizer", f"must be bpe:<size> with {sizes}, such as bpe:8000"
    if model.n_head >= 1 and model.n_embd >= 1 and model.n_embd % model.n_head:
        yield "model.n_embd", _not_a_multiple(model.n_embd, "model.n_head", model.n_head)


def _not_a_multiple(number: int, key: str, of: int) -> str:
    return f"is not a multiple of {key}={of}. The nearest: {multiples_near(number, of)}"


def _streaming(config: Config) -> Mistakes:
    data, split = config.data, config.data.held_out_split
    if split == TRAIN:
        yield "data.held_out_split", "is the split to train on. Name another one"
    if not is_streamed(data):
        if split is not None:
            remedy = "Set data.streaming=true, or leave it out"
            yield "data.held_out_split", f"applies only to streamed data sets. {remedy}"
        return
    yield from _mix(config)
    if data.documents not in (PACKED, MASKED):
        remedy = f"Use {PACKED} or {MASKED}, or prepare the text with data.streaming=false"
        yield "data.documents", f"is not possible for streamed text. {remedy}"
    name = data.tokenizer or tokenizer_of(config.model)
    if name == CHARACTERS or (name != OF_BYTES and bpe_size(name) is not None):
        of_default = "(characters) " * (data.tokenizer is None)
        what = f"{of_default}needs the whole text beforehand, which streaming does not read"
        remedy = "Name a repo or folder with a tokenizer, such as data.tokenizer=gpt2"
        yield "data.tokenizer", f"{what}. {remedy}, or {OF_BYTES}"
    if data.stream_cache_bytes < (least := 8 * data.window_bytes * max(1, len(data.mix))):
        what = f"must be at least {least}: 8 times data.window_bytes for each source"
        yield "data.stream_cache_bytes", what


def _mix(config: Config) -> Mistakes:
    mix = config.data.mix
    if mix and config.data.streaming is False:
        yield "data.streaming", "has no effect with data.mix. Leave one of them out"
    least = sum(part.weight for part in mix) / WHOLE  # smaller ones would get no window
    for part in mix:
        if not part.source.strip():
            yield "data.mix", "has an empty source. Name a file or a data set"
        if (reason := why_not_storable(part.source)) is not None:
            yield "data.mix", reason
        if not 0 < part.weight < math.inf or part.weight < least:
            what = f"has a weight of {part.weight:g} for {part.source}. Each must be above 0"
            yield "data.mix", f"{what}, finite, and at least 1/{WHOLE:,} of their sum"


def _adapters_and_frozen(config: Config) -> Mistakes:
    model, freeze = config.model, config.optim.freeze
    if model.lora_rank is not None:
        if model.pretrained is None:
            yield "model.lora_rank", "needs model.pretrained, the model to add adapters to. Set it"
        if freeze:
            what = f"has no effect with model.lora_rank={model.lora_rank}. Leave it out"
            yield "optim.freeze", what
        return
    for key in ("model.lora_alpha", "model.lora_targets"):
        if value_of(config, key):
            yield key, "applies only to LoRA. Set model.lora_rank, such as 8, as well"
    if model.frozen_dtype != AUTO and not freeze:
        remedy = "Set model.lora_rank or optim.freeze, or leave it out"
        yield "model.frozen_dtype", f"has no effect: nothing is frozen. {remedy}"
    elif model.frozen_dtype == NF4:
        what = "needs adapters, because snapshots hold other frozen weights"
        yield "model.frozen_dtype", f"{what}. Set model.lora_rank"


def _optimizer(config: Config) -> Mistakes:
    optim, rate = config.optim, config.optim.learning_rate
    has_recipe = other_model(config.model) is not None and not is_preset(config.model)
    if rate == 0 and optim.name in OPTIMIZERS:
        no_default = f"has no default for optim.name={optim.name}. Set it"  # see rate_of_recipe
        is_set = optim.name == "adamw" or not has_recipe
        yield "optim.learning_rate", "must be above 0" if is_set else no_default
    elif 0 < rate < optim.min_learning_rate:
        yield "optim.min_learning_rate", f"must be between 0 and optim.learning_rate={rate}"
    # OmegaConf accepts lists of lists.
    betas = [beta for beta in optim.betas if isinstance(beta, int | float) and 0 <= beta < 1]
    if len(optim.betas) != 2 or len(betas) != 2:
        yield "optim.betas", "must be two numbers, each at least 0 and below 1"


def _store_and_time(config: Config) -> Mistakes:
    hub, run, every = config.hub, config.run, config.snapshot.every
    if hub.url is not None and hub.repo_id is not None:
        yield "hub.url", f"excludes hub.repo_id={hub.repo_id}: leave one out"
    if hub.url is not None and (reason := _why_no_store(hub.url)) is not None:
        yield "hub.url", reason
    is_by_steps = config.snapshot.every_minutes is None and every >= 1
    if hub.milestone_every is not None and is_by_steps and hub.milestone_every % every:
        what = _not_a_multiple(hub.milestone_every, "snapshot.every", every)
        yield "hub.milestone_every", f"{what}. Only a snapshot can be a milestone"
    if run.max_minutes is not None and run.max_minutes * 60 <= run.grace_seconds:
        reserved = f"run.grace_seconds={run.grace_seconds:g} is reserved for the last snapshot"
        yield "run.max_minutes", f"must be more than {run.grace_seconds / 60:.3g}: {reserved}"


def _why_no_store(url: str) -> str | None:
    """Why a URL cannot be a store; None if it can."""
    scheme, mark, place = url.partition("://")
    if not mark or not place.strip("/") or scheme in ("http", "https"):
        return "must be the URL of a folder that can be written, such as s3://bucket/run"
    if scheme == "hf" and not re.fullmatch(rf"(?!buckets/){REPO}|buckets/{REPO}(/.*)?", place):
        return "must have the form hf://buckets/owner/name"
    if redact_urls(url) != url:
        return "must hold no user, password or query: set them in the environment"
    return None


RULES = (
    *(_single_keys, _streaming, _model_and_tokenizer),
    *(_adapters_and_frozen, _optimizer, _store_and_time),
)
