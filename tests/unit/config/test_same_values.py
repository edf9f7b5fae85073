"""What a snapshot says of the configuration is compared by value: 0, false and null are values."""

from __future__ import annotations

import copy
import json

import pytest

from config.compose import load_config
from config.schema import Config
from config.stored import as_plain
from snapshot.config_values import changed_values, value_of
from snapshot.disk.state import RunState
from snapshot.errors import SnapshotError
from training.run.start import MUST_MATCH, refuse_other_run

DATA = {"vocabulary": 7, "fingerprint": "f", "name": "text"}
FALSY = {
    "train.seed": 0,
    "train.sample_every": 0,
    "optim.warmup_steps": 0,
    "optim.betas": [0.0, 0.0],
    "optim.freeze": [],
    "model.dropout": 0.0,
    "model.pretrained": None,
    "hub.private": False,
    "data.streaming": None,
}


def with_value(base: Config, key: str, value: object) -> Config:
    config = copy.deepcopy(base)
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    return config


def state_of(config: dict) -> RunState:
    """As it comes back from state.json."""
    content = json.loads(json.dumps(config))
    return RunState("r", "a", 3, 0, 0, None, content, DATA)


def test_falsy_values_are_equal_after_a_stop_and_others_are_not():
    words = "optim.freeze=[x] data.streaming=false model.dropout=0.1 model.pretrained=a/b"
    base = load_config(words.split())
    for key, value in FALSY.items():
        now = as_plain(with_value(base, key, value))
        before = state_of(now)
        assert value_of(before.config, key) == value
        refuse_other_run(before, now, DATA)
        assert changed_values(before.config, now) == []
        other = as_plain(base)
        assert [line.split(":")[0] for line in changed_values(other, now)] == [key]
        if key in MUST_MATCH:
            for first, second in ((other, now), (now, other)):
                with pytest.raises(SnapshotError, match=f"{key}: "):
                    refuse_other_run(state_of(first), second, DATA)


def test_a_difference_is_told_in_the_words_of_the_command_line():
    base = as_plain(load_config([]))
    now = as_plain(load_config(["train.micro_batch_size=4", "hub.private=false"]))
    assert changed_values(base, now) == [
        "train.micro_batch_size: null -> 4",
        "hub.private: true -> false",
    ]
