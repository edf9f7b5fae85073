"""The accelerate config file: each entry that cannot be honoured is refused by name and value."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

import psutil
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

import families
import runs
from config.schema import Config, ConfigError
from model.families import build_model
from model.gpt import GPT, GPTConfig
from snapshot.disk.model import model_config
from tracked import tracked
from training.distributed import launch_file, processes
from training.distributed.accelerator import (
    check_configuration,
    check_model,
    effective_precision,
    set_communication,
)
from training.distributed.launcher import Launcher, is_main_process, is_one_machine
from training.distributed.processes import init_processes
from training.reporting.header import machine_line

TIMEOUT = timedelta(seconds=60)
CONFIGS = runs.ROOT / "accelerate_configs"


@pytest.fixture(autouse=True)
def states(monkeypatch):
    """What was made instead of accelerate's PartialState, which would wait for other processes."""
    made = []

    def make(**words):
        state = {"distributed_type": DistributedType.MULTI_CPU}
        made.append(SimpleNamespace(**words, **state, num_processes=words["world_size"]))
        return made[-1]

    monkeypatch.setattr(processes, "PartialState", make)
    monkeypatch.setattr(processes, "fresh_store", lambda _: ("a store", 1, 2))
    return made


@pytest.fixture
def gpus(monkeypatch):
    """Give this machine so many GPUs; at first it has none."""

    def have(number: int, capability: tuple[int, int] = (8, 0)) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    have(0)
    return have


@pytest.fixture
def launched(monkeypatch, gpus):
    """Give this process what a config file's launcher gives to the first of so many processes."""

    def launch(path: Path, number: int) -> None:
        words = ["--config_file", str(path), "--main_process_port=0", "train.py"]
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
        # The rest is torch's launcher's.
        place = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        variables = {**prepare_multi_gpu_env(arguments), **place, "WORLD_SIZE": str(number)}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


def sentence(states) -> str:
    """What `init_processes` refuses, before anything is started."""
    with pytest.raises(ConfigError) as caught:
        init_processes(TIMEOUT)
    assert states == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def mesh(**sizes: int) -> dict:
    return {f"parallelism_config_{name}_size": size for name, size in sizes.items()}


FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}
# Entries that a user has changed in a plain FSDP file, or variables, the number of processes, and
# what is said; a sentence on GPUs is that of a machine that has some.
REFUSED = [
    ({"fsdp_version": 1}, 2, "says fsdp_version: 1. .* set fsdp_version: 2"),
    ({"fsdp_auto_wrap_policy": "NO_WRAP"}, 2, "says .*: NO_WRAP. .* set TRANSFORMER_BASED_WRAP"),
    ({"fsdp_activation_checkpointing": True}, 2, "model.activation_checkpointing=true to train"),
    ({"fsdp_ignored_modules": "transformer.wte"}, 2, "says .*: transformer.wte. .* Remove it"),
    ({"fsdp_reshard_after_forward": "FULL_SHARD"}, 2, r"takes true \(less memory\) or false"),
    ({"fsdp_sharding_strategy": 5}, 2, "says .*: 5. .* accelerate_configs/fsdp_hybrid.yaml"),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, 2, "use_deepspeed: true. .* distributed_type: FSDP"),
    ({"ACCELERATE_USE_MEGATRON_LM": "true"}, 2, "use_megatron_lm.*config_tp_size for its"),
    ({**FP8, "ACCELERATE_FP8_BACKEND": "TE"}, 2, "fp8_config backend: TE. .* torchao .* set AO"),
    ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, 2, "steps: 4. .* remove the entry"),
    ({"mixed_precision": "fp16", "fsdp_offload_params": True}, 2, "from the GPU. .* bf16 or no"),
    (FP8, 2, r"an NVIDIA GPU of compute capability 8.9 \(Ada, Hopper\) or later: set .*: bf16"),
    ({}, 1, "FSDP with num_processes: 1. One process has nothing to shard"),
    (mesh(dp_shard=2, tp=2), 2, "tp_size: 2, which are 4 processes, but 2 run"),
    (mesh(dp_shard=2, cp=4), 2, "cp_size: 4, which are 8 processes, but 2 run"),
    (mesh(dp_replicate=2, dp_shard=2), 8, "dp_shard_size: 2, which are 4 processes"),
    (mesh(dp_shard=2, sp=2), 2, "sp_size: 2. DeepSpeed's sequence parallelism is not"),
    (mesh(dp_replicate=2, tp=2), 4, "dp_shard_size: 1. One shard is not sharded"),
    (mesh(dp_replicate=2), 2, "dp_shard_size: 1. One shard is not sharded"),
]
# Changes that `accelerate config` or a user may make to a plain FSDP file, and that are honoured.
HONOURED = [
    {"fsdp_transformer_layer_cls_to_wrap": "Block"},
    {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
    {"fsdp_reshard_after_forward": False, "fsdp_forward_prefetch": True},
    {"mixed_precision": "fp16", "fsdp_offload_params": True},  # without a GPU to wait for
    {"mixed_precision": "fp8", "fp8_config": {"backend": "AO", "recipe_name": "tensorwise"}},
    {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True},
    {"parallelism_config_dp_shard_size": 2},
]
SHIPPED = [path for path in tracked("accelerate_configs") if path.stem[:4] in ("ddp", "fsdp")]


@pytest.mark.parametrize(("changes", "number", "words"), REFUSED)
def test_what_cannot_be_honoured_is_refused(
    launched, states, monkeypatch, tmp_path, gpus, changes, number, words
):
    entries = {name: value for name, value in changes.items() if name.islower()}
    launched(runs.rehearsal("fsdp_cpu.yaml", tmp_path, number, **entries), number)
    for name in changes.keys() - entries.keys():
        monkeypatch.setenv(name, changes[name])
    gpus(number * ("GPU" in words))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert re.search(words, sentence(states), re.IGNORECASE)  # some values in small letters


@pytest.mark.parametrize("entries", HONOURED, ids=str)
def test_what_can_be_honoured_passes_and_fsdp_runs_on_cpus(launched, states, tmp_path, entries):
    launched(runs.rehearsal("fsdp_cpu.yaml", tmp_path, 2, **entries), 2)
    init_processes(TIMEOUT)
    joined = {"cpu": True, "store": "a store", "rank": 1, "world_size": 2, "timeout": TIMEOUT}
    assert [vars(state) for state in states] == [
        {**joined, "distributed_type": DistributedType.MULTI_GPU, "num_processes": 2}
    ]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_passes_as_it_lies(launched, states, path):
    text = path.read_text()
    number = int(text.split("num_processes:")[1].split()[0])
    launched(path, number)
    init_processes(TIMEOUT)
    fsdp = "distributed_type: FSDP" in text
    kind = DistributedType.MULTI_GPU if fsdp else DistributedType.MULTI_CPU
    assert [state.distributed_type for state in states] == [kind] * (number > 1)


@pytest.mark.parametrize("asked", ["False", "True"])
def test_where_there_is_a_gpu_fsdp_is_left_to_accelerate(
    launched, states, monkeypatch, tmp_path, gpus, asked
):
    launched(runs.rehearsal("fsdp_cpu.yaml", tmp_path, 2), 2)
    gpus(2, capability=(8, 9))
    monkeypatch.setenv("ACCELERATE_USE_CPU", asked)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    init_processes(TIMEOUT)
    on_cpu = asked == "True"  # as it was made, or as accelerate makes FSDP of it
    kind = DistributedType.MULTI_GPU if on_cpu else DistributedType.MULTI_CPU
    assert [(state.cpu, state.distributed_type) for state in states] == [(on_cpu, kind)]


# What a shell exports of other processes, what is named, and what is missing.
LEFT_OVER = [
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "WORLD_SIZE=2 and MASTER_ADDR=a", "RANK and no LOC"),
    ({"LOCAL_RANK": "1", "RANK": "1"}, "RANK=1 and LOCAL_RANK=1", "WORLD_SIZE and no MASTER_ADDR"),
    ({"WORLD_SIZE": ""}, "WORLD_SIZE=", "WORLD_SIZE and no RANK"),
    ({"WORLD_SIZE": "1", "MASTER_ADDR": "a", "RANK": "1"}, None, None),
]


@pytest.mark.parametrize(("variables", "found", "missing"), LEFT_OVER)
def test_what_is_left_of_other_processes_is_refused_or_harmless(
    states, monkeypatch, variables, found, missing
):
    for module in (launch_file, processes):
        monkeypatch.setattr(module, "launcher", lambda: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if found is None:
        init_processes(TIMEOUT)
        assert is_main_process()
        assert is_one_machine()
        assert states == []
        return
    said = sentence(states)
    assert f"environment has {found}, as for one of several processes, but no {missing}" in said
    assert "unset WORLD_SIZE RANK LOCAL_RANK MASTER_ADDR MASTER_PORT" in said


def test_a_process_that_nobody_launched_says_what_it_waits_for(launched, monkeypatch, capfd):
    launched(CONFIGS / "ddp_cpu.yaml", 2)
    monkeypatch.setattr(processes, "launcher", lambda: None)
    init_processes(TIMEOUT)
    said = capfd.readouterr().err
    assert "waiting for all 2 processes, which WORLD_SIZE and RANK name." in said


SEVERAL = "distributed_type: 'MULTI_CPU'\nnum_processes: 2\nnum_machines: 1\nuse_cpu: true\n"
ALONE = " but starts one process that trains alone. For several, set distributed_type: MULTI_GPU"
NO_GPU = "requests GPUs, but torch finds none. Check the driver"
MACHINE = "launcher starts 4 processes on this machine, and {} GPUs are visible"
# The words of a launch in accelerate_configs/, the processes that it starts, the GPUs, and what is
# refused.
LAUNCHES = [
    ("train.py", 1, 0, None),
    ("--config_file single_gpu.yaml --cpu train.py", 1, 0, None),
    ("--config_file cpu.yaml train.py --num_processes=2", 1, 0, None),
    ("--config_file fsdp_cpu.yaml --num_processes 3 train.py", 3, 0, None),
    ("--config_file none.yaml train.py", 1, 0, None),  # accelerate says it
    ("--no_such_option train.py", 1, 0, None),
    ("--config_file several.yaml train.py train.max_steps=5", 1, 0, "num_processes: 2," + ALONE),
    ("--num_processes 2 --config_file cpu.yaml train.py", 1, 0, "num_processes: 2," + ALONE),
    ("--num_processes=2 train.py", 1, 0, "num_processes: 2," + ALONE),
    (
        "--config_file ddp_multinode.yaml --machine_rank 1 --cpu train.py",
        1,
        0,
        "num_machines: 2 and num_processes: 8," + ALONE,
    ),
    ("--config_file ddp_cpu.yaml train.py", 2, 0, None),
    ("--config_file ddp.yaml train.py", 4, 0, NO_GPU),
    ("--config_file ddp.yaml train.py", 4, 4, None),
    ("--config_file fsdp.yaml train.py", 4, 1, MACHINE.format(1)),
    ("--config_file ddp_multinode.yaml train.py", 8, 2, MACHINE.format(2)),
]


@pytest.mark.parametrize(("words", "number", "visible", "words_said"), LAUNCHES)
def test_what_the_launcher_would_ignore_is_refused(
    launched, states, monkeypatch, tmp_path, gpus, words, number, visible, words_said
):
    (tmp_path / "several.yaml").write_text(SEVERAL)
    words = words.replace("several.yaml", str(tmp_path / "several.yaml"))
    started_by = Launcher(psutil.Process(), ("accelerate", "launch", *words.split()))
    monkeypatch.setattr(launch_file, "launcher", lambda: started_by)
    monkeypatch.setattr(launch_file, "default_config_file", str(tmp_path / "none.yaml"))
    monkeypatch.chdir(CONFIGS)
    if number > 1:
        launched(CONFIGS / "ddp_cpu.yaml", number)
        monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    gpus(visible)
    if words_said is not None:
        assert words_said in sentence(states)
        # Each process of another launcher may see one GPU of its own.
        monkeypatch.setattr(launch_file, "launcher", lambda: None)
    assert [*launch_file._ignored_by_launcher(), *launch_file._too_few_gpus()] == []


class Opaque(GPT):
    """A model with attention of its own."""

    can_share_context = False
    tensor_plan: ClassVar = {}


def accelerator_of(
    tensor: int = 1, context: int = 1, blocks: str = "", offloads: bool = False
) -> SimpleNamespace:
    """An accelerator whose processes share matrices or sequences, or shard those blocks."""
    offload = SimpleNamespace(pin_memory=True) if offloads else None
    plugin = {"cpu_offload": offload, "transformer_cls_names_to_wrap": blocks.split(",")}
    return SimpleNamespace(
        num_processes=tensor * context,
        parallelism_config=SimpleNamespace(tp_size=tensor, cp_size=context, dp_replicate_size=1),
        is_fsdp2=bool(blocks),
        state=SimpleNamespace(fsdp_plugin=SimpleNamespace(**plugin)),
    )


def gpt(kind: type[GPT] = GPT) -> GPT:
    return kind(GPTConfig(vocab_size=5, block_size=4, n_layer=1, n_head=6, n_embd=12))


def mixtral(**sizes: int) -> torch.nn.Module:
    return build_model(model_config({**families.FAMILIES["mixtral"], **sizes}, "mixtral"))


UNEVEN = "cp_size: 4, and the number of heads .*, {0}, is .* Set it to a divisor of {0}"
MODELS = [
    ({"blocks": "GPT2Block"}, gpt, "of the class Block: remove the entry"),
    ({"blocks": "Block,Embedding"}, gpt, "of the class Block: remove the entry"),
    ({"blocks": "Block"}, gpt, None),
    ({"context": 2}, gpt, None),
    ({"context": 2}, lambda: mixtral(num_key_value_heads=1), None),
    ({"context": 2}, lambda: gpt(Opaque), "cp_size: 2, but several processes cannot share the seq"),
    ({"context": 4}, gpt, UNEVEN.format(6)),
    ({"context": 4, "tensor": 2}, gpt, UNEVEN.format(3)),  # of which each has three
    ({"context": 3, "tensor": 2}, gpt, None),
    ({"tensor": 4}, gpt, "tp_size: 4, but the model has 6 heads"),
    ({}, lambda: gpt(Opaque), None),
    ({"tensor": 2}, lambda: gpt(Opaque), "cannot share the matrices of gpt2"),
    ({"tensor": 2}, mixtral, r"of mixtral\. Set it to 1: FSDP shards them, and "),
]


@pytest.mark.parametrize(("shape", "build", "words"), MODELS)
def test_what_processes_cannot_divide_of_a_model_is_refused(shape, build, words):
    accelerator, model = accelerator_of(**shape), build()
    if words is None:
        check_model(accelerator, model)
        return
    with pytest.raises(ConfigError, match=words):
        check_model(accelerator, model)


SHARED = "{} cannot be used where processes share matrices"
SENT_ONCE = "run.sync_each_micro_batch"
CONFIGURATIONS = [
    ({"tensor": 2}, "optim.name", "muon", None),
    ({"tensor": 2}, "model.lora_rank", 4, SHARED.format("model.lora_rank=4")),
    ({"tensor": 2}, "model.frozen_dtype", "nf4", SHARED.format("model.frozen_dtype=nf4")),
    ({"tensor": 2}, "mixed_precision", "fp16", SHARED.format("mixed_precision: fp16")),
    ({"tensor": 2}, "mixed_precision", "fp8", SHARED.format("mixed_precision: fp8")),
    ({"context": 1}, "data.block_size", 131, None),
    ({"context": 2}, "data.block_size", 131, "=131 is not a multiple of 2, .* Use 130 or 132."),
    ({"context": 2}, "data.block_size", 1, "=1 is not a multiple of 2, .* Use 2."),
    ({"offloads": True}, SENT_ONCE, True, None),
    ({"offloads": False}, SENT_ONCE, False, None),
    ({"offloads": True}, SENT_ONCE, False, "fsdp_offload_params: true shards on the CPU"),
]


@pytest.mark.parametrize(("shape", "key", "value", "words"), CONFIGURATIONS)
def test_what_processes_cannot_divide_of_a_run_is_refused(monkeypatch, shape, key, value, words):
    accelerator, config = accelerator_of(blocks="Block", **shape), Config()
    if key == "mixed_precision":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", value)
    else:
        group, name = key.split(".")
        setattr(getattr(config, group), name, value)
    if words is None:
        check_configuration(accelerator, config)
        return
    with pytest.raises(ConfigError, match=words):
        check_configuration(accelerator, config)


@pytest.mark.parametrize(
    ("last", "each", "expected"),
    [
        (False, True, {"gradient_sync": True, "all_reduce": False}),
        (True, True, {"gradient_sync": True, "all_reduce": True}),
        (False, False, {"gradient_sync": False, "all_reduce": False}),
        (True, False, {"gradient_sync": True, "all_reduce": True}),
    ],
)
def test_replicas_reduce_in_the_last_micro_batch_alone(last, each, expected):
    model = MagicMock()
    set_communication(model, last=last, each=each)
    for name, value in expected.items():
        getattr(model, f"set_requires_{name}").assert_called_once_with(value)
    model.set_reshard_after_backward.assert_called_once_with(expected["gradient_sync"])


@pytest.mark.parametrize(
    ("asked", "has_bf16", "gpu", "precision"),
    [
        ("bf16", False, False, "no"),
        ("bf16", False, "hidden", "no"),
        ("bf16", True, False, None),
        ("bf16", False, True, None),
        ("fp8", False, False, "no"),
        ("fp8", True, False, "bf16"),
        ("fp16", False, False, None),
        ("no", False, False, None),
    ],
)
def test_bf16_is_for_cpus_that_have_it(monkeypatch, gpus, asked, has_bf16, gpu, precision):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    gpus(bool(gpu))
    monkeypatch.setenv("ACCELERATE_USE_CPU", str(gpu == "hidden"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    assert effective_precision() == precision
    backend = SimpleNamespace(backend=SimpleNamespace(value="NO"))
    accelerator = SimpleNamespace(
        num_processes=1,
        device=torch.device("cpu"),
        mixed_precision=precision or asked,
        state=SimpleNamespace(dynamo_plugin=backend),
    )
    said = "float32 (this CPU has no bf16 instructions)" in machine_line(accelerator)
    assert said == (precision == "no")


def test_a_launch_that_is_refused_says_why_once(small, tmp_path):
    """Of a user's file of version 1, where the main process starts last. Nothing is written."""
    slow = "import os, time\ntime.sleep(3 * (os.environ.get('LOCAL_RANK') == '0'))\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    path = runs.rehearsal("fsdp_cpu.yaml", tmp_path, 2, fsdp_version=1)
    words = runs.launch_command(path, *small, f"run.dir={tmp_path / 'run'}")
    result = runs.run(words, PYTHONPATH=str(tmp_path))
    assert result.returncode != 0
    assert result.stderr.count("error: The accelerate config file says fsdp_version: 1. ") == 1
    assert "step 1" not in result.stdout
    assert not (tmp_path / "run").exists()
