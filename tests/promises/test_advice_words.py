"""Each value, argument and command that a sentence about the words of a run names is accepted."""

from __future__ import annotations

import re
import shlex

import pytest
from accelerate.commands.launch import launch_command_parser

import plan as plan_script
from config.checks import CHOICES, RANGES, value_of
from config.compose import load_config
from config.schema import KEYS, ConfigError
from data.split import Split

STREAMED = ["data.streaming=true", "data.source=me/texts", "data.tokenizer=gpt2"]
CACHED = [*STREAMED, "data.stream_cache_bytes=1000"]
HELD_OUT = ["data.held_out_split=validation", "data.source=me/texts", "data.tokenizer=gpt2"]
RATE = r"between (0) and optim.learning_rate=([\de.-]+\d)"
CONVERSATIONS = [*STREAMED, "data.documents=conversations"]
NAMED = {
    "model.n_embd": (["model.n_embd=130"], r"nearest: (\d+) or (\d+)"),
    "hub.milestone_every": (["hub.milestone_every=1300"], r"(\d+) or (\d+)\.$"),
    "data.val_fraction": (["data.val_fraction=0.7"], r" and ([\d.]+\d)\.$"),
    "optim.min_learning_rate": (["optim.learning_rate=1e-5"], RATE),
    "data.tokenizer": (
        [*STREAMED[:2], "data.tokenizer=bpe:8000"],
        r"tokenizer=(\w+), or (bpe:\d+)",
    ),
    "data.stream_cache_bytes": (CACHED, r"at least (\d+): "),
    "data.streaming of conversations": (CONVERSATIONS, r"data\.streaming=(false)"),
    "data.streaming": (HELD_OUT, r"Set data\.streaming=(true)"),
    "hub.license": (["hub.license=MIT"], r"such as (\S+) or (\S+),"),
    "hub.language": (["hub.language=English"], r"such as (\S+) or (\S+),"),
    "model.lora_alpha": (["model.lora_alpha=8"], None),
    "model": (["model=gtp2"], r"nearest is (\w+)"),
    "data.source": (["data=my.txt"], r"use data\.source=(\S+)\. All"),
    "run.tracker": (["run.tracker=5"], r"such as (\S+), or null"),
    "optim.freeze": (["optim.freeze=5"], r"such as (\S+)\.$"),
    "data.mix": (["data.mix=5", "data.tokenizer=gpt2"], r"'data\.mix=(\S+)', whose"),
}
"""By key: the words that are refused, and the values for it that the sentence names; None: the key
is one to leave out, or to write without what stands before it."""


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    return str(caught.value)


@pytest.mark.parametrize("case", NAMED)
def test_each_value_that_a_sentence_names_is_accepted(case):
    key, (words, pattern) = case.partition(" ")[0], NAMED[case]
    said = refusal(*words)
    others = [word for word in words if word.lstrip("+").partition("=")[0] not in (key, "data")]
    if key == "model":
        others = []
    if pattern is None:
        value = said.partition(f"write {key}=")[1]
        load_config([*others, f"{key}=7"] if value else others)
        return
    found = re.search(pattern, said)
    assert found, said
    for value in found.groups():
        (word,) = shlex.split(f"{key}={value}")  # as a shell hands it over
        load_config([*others, word])


def test_the_least_and_the_most_of_each_whole_number_are_as_said():
    """All at once: the sentences are independent of each other."""
    others = ("model.lora", "hub.milestone")
    keys = [key for key in RANGES if KEYS[key].startswith("int") and not key.startswith(others)]
    said = refusal(*(f"{key}=-1" for key in keys))
    found = re.findall(r"(\S+)=-1 must be between (\d+) and (\d+)", said)
    assert [key for key, _, _ in found] == keys
    load_config([f"{key}={least}" for key, least, _ in found])
    load_config([f"{key}={most}" for key, _, most in found] + ["model.n_head=10000"])


@pytest.mark.thorough
@pytest.mark.parametrize("key", CHOICES)
def test_each_choice_that_is_listed_is_accepted(key):
    (listed,) = re.findall(rf"{key}=none-of-them must be (.+)\.", refusal(f"{key}=none-of-them"))
    for choice in re.split(", | or ", listed):
        more = ["data.tokenizer=a/chat"] if choice == "conversations" else []
        if key == "model.frozen_dtype":  # something has to be frozen
            more = ["model.pretrained=a/b", "model.lora_rank=2"]
        value = value_of(load_config([f"{key}={choice}", *more]), key)
        assert str(value).lower() == choice  # false and true are choices, too


def test_the_least_time_is_in_the_unit_of_its_key():
    (least,) = re.findall(r"more than ([\d.]+\d)", refusal("run.max_minutes=0.1"))
    load_config([f"run.max_minutes={float(least) + 0.01}"])


PLANS = [
    ["--processes=2", "--memory=8", "data.source=my text.txt", "train.global_batch_size=8"],
    ["--processes=4", "--device=cpu", "--memory=8", "train.global_batch_size=8"],
    ["--processes=16", "--machines=2", "--memory=8", "train.global_batch_size=16"],
    ["--processes=4", "--precision=fp16", "--memory=8", "train.global_batch_size=8"],
]


@pytest.mark.parametrize(
    "words", [PLANS[0], *(pytest.param(words, marks=pytest.mark.slow) for words in PLANS[1:])]
)
def test_the_command_of_a_plan_starts_what_was_planned(words, capsys):
    words = [*words, "model.n_layer=1", "model.n_embd=32"]
    planned = plan_script.parse(words)
    assert plan_script.main(words) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    started = launched(said)
    assert int(started.num_processes) == planned.processes
    assert int(started.num_machines) == (planned.machines or 1)
    assert started.mixed_precision == planned.precision
    assert started.training_script == "train.py"
    config = load_config(started.training_script_args)
    assert config.data.source == load_config(planned.overrides).data.source
    train = config.train
    assert not Split.of(train.global_batch_size, train.micro_batch_size, planned.processes).padding


def launched(said: str):
    """What `accelerate launch` makes of the command of a plan."""
    from accelerate.commands.launch import _validate_launch_command

    program, verb, *rest = shlex.split(said.partition(": ")[2])
    assert (program, verb) == ("accelerate", "launch")
    return _validate_launch_command(launch_command_parser().parse_args(rest))[0]


@pytest.mark.thorough
def test_what_does_not_fit_fits_as_the_plan_says(capsys):
    words = ["data.block_size=1024", "model.n_layer=2", "train.global_batch_size=64"]
    words += ["--memory=1.2"]
    assert plan_script.main([*words, "train.micro_batch_size=64"]) == 3
    (takes,) = re.findall(r"one process fits at most (\d+)\.$", capsys.readouterr().out.strip())
    fits = max(size for size in range(1, int(takes) + 1) if 64 % size == 0)
    assert plan_script.main([*words, f"train.micro_batch_size={fits}"]) == 0
