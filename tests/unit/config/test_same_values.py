"""What a snapshot says of the configuration is compared by value: 0, false and null are values."""

from __future__ import annotations

import copy
import json
from dataclasses import fields

import pytest

from config.checks import problems
from config.compose import load_config
from config.schema import KEYS, Config
from config.stored import as_plain
from snapshot.config_values import changed_values, value_of
from snapshot.disk.state import RunState
from snapshot.errors import SnapshotError
from training.run.start import MUST_MATCH, refuse_other_run

DATA = {"vocabulary": 7, "fingerprint": "f", "name": "text"}
FALSY = {
    "int": [0],
    "float": [0.0],
    "bool": [False],
    "str": [""],
    "list[float]": [[0.0, 0.0]],
    "list[str]": [[]],
    "list[MixPart]": [[]],
}


def with_value(base: Config, key: str, value: object) -> Config:
    config = copy.deepcopy(base)
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    return config


def falsy_values() -> list[tuple[str, object]]:
    """Every key with each of its falsy values that the checks allow."""
    base, found = load_config([]), []
    for key in KEYS:
        section, name = key.split(".")
        group = getattr(base, section)
        (kind,) = (entry.type for entry in fields(group) if entry.name == name)
        plain, _, optional = kind.partition(" | ")
        for value in FALSY[plain] + ([None] if optional else []):
            if not problems(with_value(base, key, value)):
                found.append((key, value))
    return found


def state_of(config: dict) -> RunState:
    """As it comes back from state.json."""
    content = json.loads(json.dumps(config))
    return RunState("r", "a", 3, 0, 0, None, content, DATA)


def test_falsy_values_are_equal_after_a_stop_and_others_are_not():
    base, pairs = load_config([]), falsy_values()
    expected = {"train.seed", "model.dropout", "hub.private", "optim.betas"}
    assert expected | {"train.sample_every", "optim.warmup_steps"} <= {key for key, _ in pairs}
    for key, value in pairs:
        now = as_plain(with_value(base, key, value))
        before = state_of(now)
        assert value_of(before.config, key) == value
        refuse_other_run(before, now, DATA)
        assert changed_values(before.config, now) == []
        other = as_plain(base)
        if value_of(other, key) == value:
            continue
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
