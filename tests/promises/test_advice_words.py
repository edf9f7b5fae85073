"""Each value, argument and command that a sentence about the words of a run names is accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

import plan as plan_script
from config.checks import CHOICES, RANGES, value_of
from config.compose import load_config
from config.schema import KEYS, ConfigError
from data.split import Split

STREAMED = ["data.streaming=true", "data.source=me/texts", "data.tokenizer=gpt2"]
NAMED = {
    "heads": (["model.n_embd=130"], "model.n_embd", r"nearest: (\d+) or (\d+)"),
    "milestones": (["hub.milestone_every=1300"], "hub.milestone_every", r"(\d+) or (\d+)\.$"),
    "a fraction": (["data.val_fraction=0.7"], "data.val_fraction", r" and ([\d.]+\d)\.$"),
    "a rate": (
        ["optim.learning_rate=1e-5"],
        "optim.min_learning_rate",
        r"between (0) and optim.learning_rate=([\de.-]+\d)",
    ),
    "a learned tokenizer": (
        ["data.tokenizer=bpe:9"],
        "data.tokenizer",
        r"such as (bpe:\d+)",
    ),
    "a tokenizer of a stream": (
        [*STREAMED[:2], "data.tokenizer=bpe:8000"],
        "data.tokenizer",
        r"data\.tokenizer=(\w+), or (bpe:\d+)",
    ),
    "what is read ahead": (
        [*STREAMED, "data.window_bytes=40000000", "data.prefetch_bytes=30000000"],
        "data.prefetch_bytes",
        r"at least (\d+): ",
    ),
    "the cache of a stream": (
        [*STREAMED, "data.stream_cache_bytes=1000"],
        "data.stream_cache_bytes",
        r"at least (\d+): ",
    ),
    "documents of a stream": (
        [*STREAMED, "data.documents=conversations"],
        "data.streaming",
        r"data\.streaming=(false)",
    ),
    "a held-out split": (
        ["data.held_out_split=validation", "data.source=me/texts", "data.tokenizer=gpt2"],
        "data.streaming",
        r"Set data\.streaming=(true)",
    ),
    "a license": (["hub.license=MIT"], "hub.license", r"such as (\S+) or (\S+),"),
    "a language": (["hub.language=English"], "hub.language", r"such as (\S+) or (\S+),"),
    "targets of no adapters": (["model.lora_alpha=8"], "model.lora_alpha", None),
    "a preset": (["model=gtp2"], "model", r"nearest is (\w+)"),
    "a text of one's own": (["data=my.txt"], "data.source", r"use data\.source=(\S+)\. All"),
    "trackers": (["run.tracker=5"], "run.tracker", r"such as (\S+), or null"),
    "frozen parameters": (["optim.freeze=5"], "optim.freeze", r"such as (\S+)\.$"),
    "betas": (["optim.betas=5"], "optim.betas", r"such as (\S+)\.$"),
    "a mix": (["data.mix=5", "data.tokenizer=gpt2"], "data.mix", r"'data\.mix=(\S+)', whose"),
}
"""By case: the words that are refused, the key to give, and the values that the sentence names;
None: the key is one to leave out, or to write without what stands before it."""

QUICK = {"heads", "a rate", "what is read ahead", "the cache of a stream", "a preset", "a mix"}
"""The others need no other code of the reader of words."""


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    return str(caught.value)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.thorough] * (case not in QUICK)) for case in NAMED],
)
def test_each_value_that_a_sentence_names_is_accepted(case):
    words, key, pattern = NAMED[case]
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


def test_a_name_hydra_cannot_parse_works_as_the_sentence_says():
    """Each refusal names the next argument, until there is none."""
    word = "data.cache_dir=~nobody-of-that-name/a b"
    for _ in range(3):
        try:
            config = load_config([word])
            break
        except ConfigError as error:
            said = str(error)
        quoted = said.partition(" Write ")[2].removesuffix(".")
        named = said.partition(": write ")[2].removesuffix(".")
        (word,) = shlex.split(quoted) if quoted else [f'data.cache_dir="{named}"']
    assert config.data.cache_dir == str(Path.cwd() / "~nobody-of-that-name" / "a b")


PLANS = {
    "one": ["--memory=8"],
    "two": ["--processes=2", "--memory=8", "data.source=my text.txt", "train.global_batch_size=8"],
    "of a CPU": ["--processes=4", "--device=cpu", "--memory=8", "train.global_batch_size=8"],
    "machines": ["--processes=16", "--machines=2", "--memory=8", "train.global_batch_size=16"],
    "fp16": ["--processes=4", "--precision=fp16", "--memory=8", "train.global_batch_size=8"],
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case != "two")) for case in PLANS]
)
def test_the_command_of_a_plan_starts_what_was_planned(case, capsys):
    words = [*PLANS[case], "model.n_layer=1", "model.n_embd=32"]
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
