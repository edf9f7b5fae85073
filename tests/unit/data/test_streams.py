"""The keys of a streamed text, and when one is streamed unasked."""

from __future__ import annotations

import json

import pytest

import runs
from config.compose import load_config
from config.schema import ConfigError
from config.stored import as_plain
from snapshot.disk.state import read_state
from snapshot.errors import SnapshotError

TWO = "data.mix=[{source:a/*.parquet,weight:0.7},{source:me/b,weight:0.3,text_column:body}]"
OF_BYTES = "data.tokenizer=bpe:257"


def test_a_mix_has_sources_weights_and_columns():
    config = load_config([TWO, OF_BYTES])
    assert [(part.source, part.weight, part.text_column) for part in config.data.sources] == [
        ("a/*.parquet", 0.7, None),
        ("me/b", 0.3, "body"),
    ]
    assert config.run.name == "parquet-b"
    secret = "data.mix=[{source:'https://x.org/a.jsonl?token=secret'}]"
    config = load_config([secret, OF_BYTES, "run.name=x"])
    assert as_plain(config)["data"]["mix"][0]["source"] == "https://x.org/a.jsonl?***"


REFUSED = {
    "data.tokenizer=null (characters) needs the whole text beforehand": TWO,
    "data.tokenizer=char needs the whole text beforehand": f"{TWO} data.tokenizer=char",
    "bpe:300 needs the whole text beforehand": "data.streaming=true data.tokenizer=bpe:300",
    "streaming=false has no effect with data.mix": f"{TWO} {OF_BYTES} data.streaming=false",
    "held_out_split=validation applies only to streamed": "data.held_out_split=validation",
    "held_out_split=train is the split to": f"{TWO} {OF_BYTES} data.held_out_split=train",
    "conversations is not possible": f"{TWO} {OF_BYTES} data.documents=conversations",
    "has a weight of 0 for a. Each must be above 0": f"data.mix=[{{source:a,weight:0}}] {OF_BYTES}",
    "has a weight of 1e-06 for b. Each must be above 0, finite, and at least 1/10,000": (
        f"data.mix=[{{source:a}},{{source:b,weight:1e-6}}] {OF_BYTES}"
    ),
    "data.mix=[{source:a,share:1}] is not a list such as 'data.mix=[{source": (
        f"data.mix=[{{source:a,share:1}}] {OF_BYTES}"
    ),
    "data.mix=a is not a list such as": f"data.mix=a {OF_BYTES}",
    "data.streaming=perhaps is not true or false, or null": "data.streaming=perhaps",
    "must be at least 512000000": f"{TWO} {OF_BYTES} data.stream_cache_bytes=100000000",
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_streamed_gets_a_sentence(sentence):
    with pytest.raises(ConfigError) as raised:
        load_config(REFUSED[sentence].split())
    assert sentence in str(raised.value)


FOREIGN = [{"row": -1}, {"row": True}, {"epoch": "1"}, {"blocks": 2**50}, {"source": 1}]
FOREIGN += [{"revision": "../main"}, {"more": 1}, []]


@pytest.mark.parametrize("change", FOREIGN, ids=str)
def test_a_snapshot_with_a_foreign_cursor_is_refused(finished_run, tmp_path, change):
    content = json.loads((runs.snapshot(finished_run, 30) / "state.json").read_text())
    place = {"epoch": 1, "window": 2, "row": 3, "token": 4, "blocks": 5}
    cursor = {"source": "a", "revision": None, **place}
    for stream, is_valid in (([cursor], True), ([cursor | dict(change)] if change else [1], False)):
        (tmp_path / "state.json").write_text(json.dumps({**content, "stream": stream}))
        if is_valid:
            assert read_state(tmp_path).stream == stream
        else:
            with pytest.raises(SnapshotError, match="has no valid stream"):
                read_state(tmp_path)
