"""The keys of a streamed text, and their checks."""

from __future__ import annotations

import math

from config.problems import Problems, is_storable, why_not_storable
from config.schema import Config, other_model
from data.columns import PACKED
from data.reading.groups import TRAIN
from data.sources import BUILT_IN
from data.streaming.shuffle import WHOLE, shares_of
from data.tokenizer import CHARACTERS, OF_BYTES, bpe_size


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
        data.documents == PACKED,
        "data.documents",
        f"is not possible for streamed text, which is always {PACKED}. Leave it out, or prepare "
        "the text with data.streaming=false",
    )
    name = data.tokenizer or (CHARACTERS if other_model(found.config.model) is None else "")
    need(
        name in ("", OF_BYTES) or (name != CHARACTERS and bpe_size(name) is None),
        "data.tokenizer",
        "needs the whole text beforehand, which streaming does not read. Name a repo or folder "
        f"with a tokenizer, such as data.tokenizer=gpt2, or {OF_BYTES}, whose tokens are bytes",
    )
    least = data.window_bytes * max(1, len(data.mix))
    rule = f"must be at least {least}: data.window_bytes for each source"
    need(data.prefetch_bytes >= least, "data.prefetch_bytes", rule)
    least = 4 * data.prefetch_bytes
    rule = f"must be at least {least}: 4 times data.prefetch_bytes"
    need(data.stream_cache_bytes >= least, "data.stream_cache_bytes", rule)
