"""The accelerate config file: each entry that cannot be honoured is refused by name and value."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

import families
import runs
from config.schema import Config, ConfigError, DataConfig, OptimConfig, refuse_uneven_chunks
from model.families import build_model
from model.gpt import GPT, GPTConfig
from snapshot.disk.model import model_config
from tracked import tracked
from training.distributed import launch_file, processes
from training.distributed.accelerator import check_configuration, check_model, effective_precision
from training.distributed.launcher import Launcher, is_main_process, is_one_machine
from training.distributed.processes import init_processes

TIMEOUT = timedelta(seconds=60)

FSDP, DDP = "fsdp_cpu.yaml", "ddp_cpu.yaml"


def entry(remedy: str, **entries) -> tuple:
    """A row of a plain FSDP file for two processes of which a user has changed an entry."""
    ((name, value),) = entries.items()
    return FSDP, entries, {}, 2, [f"accelerate config file says {name}: {value}. ", remedy]


def mesh(processes: int, words: str, **sizes: int) -> tuple:
    """A row of a parallelism_config with these sizes."""
    entries = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    return FSDP, entries, {}, processes, [f"parallelism_config_{words}"]


def variable(*words: str, **values: str) -> tuple:
    """A row of what the launcher sets for a file of another kind."""
    return DDP, {}, values, 2, list(words)


ENTRIES = [
    entry("set fsdp_version: 2", fsdp_version=1),
    entry("set TRANSFORMER_BASED_WRAP", fsdp_auto_wrap_policy="NO_WRAP"),
    entry("model.activation_checkpointing=true", fsdp_activation_checkpointing=True),
    entry("Remove it", fsdp_ignored_modules="transformer.wte"),
    entry("takes true (less memory) or false", fsdp_reshard_after_forward="FULL_SHARD"),
    entry("accelerate_configs/fsdp_hybrid.yaml", fsdp_sharding_strategy=5),
]
ENGINES = [
    variable("use_deepspeed: true", "distributed_type: FSDP", ACCELERATE_USE_DEEPSPEED="true"),
    variable("use_megatron_lm", "config_tp_size for its", ACCELERATE_USE_MEGATRON_LM="true"),
    variable(
        "fp8_config backend: TE",
        "Only torchao is supported: set AO",
        ACCELERATE_MIXED_PRECISION="fp8",
        ACCELERATE_FP8_BACKEND="TE",
    ),
    variable(
        "gradient_accumulation_steps: 4",
        "train.micro_batch_size: remove the entry",
        ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4",
    ),
]
# A shipped file, the entries that a user has changed, variables of the launcher, the number of
# processes, and what the sentence says.
REFUSED = [
    *ENTRIES,
    *ENGINES,
    (FSDP, {}, {}, 1, ["FSDP with num_processes: 1. One process has nothing to shard"]),
    mesh(2, "tp_size: 2, which are 4 processes, but 2 run", dp_shard=2, tp=2),
    mesh(2, "cp_size: 4, which are 8 processes, but 2 run", dp_shard=2, cp=4),
    mesh(8, "dp_shard_size: 2, which are 4 processes", dp_replicate=2, dp_shard=2),
    mesh(2, "sp_size: 2. DeepSpeed's sequence parallelism is not", dp_shard=2, sp=2),
    mesh(4, "dp_shard_size: 1. One shard is not sharded", dp_replicate=2, tp=2),
    mesh(2, "dp_shard_size: 1. One shard is not sharded", dp_replicate=2),
]
# Changes that `accelerate config` or a user may make to a plain FSDP file, and that are honoured.
HONOURED = {
    "nothing": {},
    "the class of the model": {"fsdp_transformer_layer_cls_to_wrap": "Block"},
    "the strategy that is the default": {"fsdp_sharding_strategy": "FULL_SHARD"},
    "weights on the CPU": {"fsdp_offload_params": True},
    "what changes no result": {
        "fsdp_reshard_after_forward": False,
        "fsdp_forward_prefetch": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
    "fp16": {"mixed_precision": "fp16"},
    "fp8 by torchao": {
        "mixed_precision": "fp8",
        "fsdp_cpu_ram_efficient_loading": True,
        "fp8_config": {"backend": "AO", "recipe_name": "tensorwise"},
    },
    "compiled by block": {
        "dynamo_backend": "INDUCTOR",
        "dynamo_use_regional_compilation": True,
    },
    "all processes in one group": {"parallelism_config_dp_shard_size": 2},
}
SHIPPED = [path for path in tracked("accelerate_configs") if path.stem[:4] in ("ddp", "fsdp")]


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
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    return made


def name_processes(monkeypatch, processes: int) -> None:
    """Set what a launcher sets for the first of several processes."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in {"WORLD_SIZE": str(processes), **place}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def launched(monkeypatch):
    """Give this process the environment that accelerate's own launcher makes of a config file."""

    def launch(path, processes):
        words = ["--config_file", str(path), "--main_process_port=0", "train.py"]
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
        for name, value in prepare_multi_gpu_env(arguments).items():
            monkeypatch.setenv(name, value)
        name_processes(monkeypatch, processes)  # as torch's launcher does

    return launch


def sentences(states) -> list[str]:
    """What `init_processes` refuses, before anything is started."""
    with pytest.raises(ConfigError) as caught:
        init_processes(TIMEOUT)
    assert states == []
    return str(caught.value).splitlines()


@pytest.mark.parametrize(("file", "entries", "values", "processes", "words"), REFUSED)
def test_what_cannot_be_honoured_is_refused(
    launched, states, monkeypatch, tmp_path, file, entries, values, processes, words
):
    launched(runs.rehearsal(file, tmp_path, processes, **entries), processes)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    (sentence,) = sentences(states)
    for part in words:  # the launcher hands some values on in small letters
        assert part.lower() in sentence.lower()


@pytest.mark.parametrize("named", ["GPT2Block", "Block,Embedding"])
def test_other_blocks_than_the_model_has_are_refused(named):
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=named.split(","))
    state = SimpleNamespace(fsdp_plugin=plugin)
    accelerator = SimpleNamespace(is_fsdp2=True, state=state, parallelism_config=None)
    model = GPT(GPTConfig(vocab_size=5, block_size=4, n_layer=1, n_head=1, n_embd=8))
    with pytest.raises(ConfigError, match="of the class Block: remove the entry"):
        check_model(accelerator, model)
    plugin.transformer_cls_names_to_wrap = ["Block"]
    check_model(accelerator, model)


class Opaque(GPT):
    """A model with attention of its own."""

    can_share_context = False
    tensor_plan: ClassVar = {}


def a_run(tensor: int, length: int = 64, context: int = 1, **optim) -> tuple:
    """An accelerator whose processes share matrices or sequences, and a configuration."""
    mesh = SimpleNamespace(tp_size=tensor, cp_size=context, dp_replicate_size=1)
    accelerator = SimpleNamespace(
        num_processes=tensor * context,
        parallelism_config=mesh,
        mixed_precision="no",
        is_fsdp2=False,
    )
    return accelerator, Config(data=DataConfig(block_size=length), optim=OptimConfig(**optim))


def of_family(name: str, **sizes: int) -> torch.nn.Module:
    return build_model(model_config({**families.FAMILIES[name], **sizes}, name))


SIZES = GPTConfig(vocab_size=5, block_size=4, n_layer=1, n_head=6, n_embd=12)
UNEVEN = "cp_size: 4, and the number of heads .*, {}, is .* Set it to a divisor of {}"
# Processes that share matrices, those that share sequences, the model, and what is refused.
SHARING = [
    (1, 2, lambda: GPT(SIZES), None),
    (1, 2, lambda: of_family("mixtral", num_key_value_heads=1), None),
    (1, 2, lambda: Opaque(SIZES), "cp_size: 2, but several processes cannot share the sequences"),
    (1, 4, lambda: GPT(SIZES), UNEVEN.format(6, 6)),
    (2, 4, lambda: GPT(SIZES), UNEVEN.format(3, 3)),  # of which each has three
    (2, 3, lambda: GPT(SIZES), None),
    (4, 1, lambda: GPT(SIZES), "tp_size: 4, but the model has 6 heads"),
    (1, 1, lambda: Opaque(SIZES), None),
    (2, 1, lambda: Opaque(SIZES), "cannot share the matrices of gpt2"),
    (2, 1, lambda: of_family("mixtral"), r"of mixtral\. Set it to 1: FSDP shards them, and "),
]


@pytest.mark.parametrize(("tensor", "context", "build", "words"), SHARING)
def test_what_processes_cannot_share_is_refused(tensor, context, build, words):
    accelerator, _ = a_run(tensor, context=context)
    if words is None:
        check_model(accelerator, build())
        return
    with pytest.raises(ConfigError, match=words):
        check_model(accelerator, build())


def test_what_shared_matrices_do_not_allow_is_refused(monkeypatch):
    for name in ("adamw", "muon"):
        check_configuration(*a_run(2, name=name))
    for key, value in (("lora_rank", 4), ("frozen_dtype", "nf4")):
        accelerator, config = a_run(2)
        setattr(config.model, key, value)
        with pytest.raises(ConfigError, match=f"model.{key}={value} cannot be used where proc"):
            check_configuration(accelerator, config)
    for precision in ("fp16", "fp8"):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        with pytest.raises(ConfigError, match=f"mixed_precision: {precision} cannot be used"):
            check_configuration(*a_run(2))


@pytest.mark.parametrize(("length", "remedy"), [(131, "Use 130 or 132."), (1, "Use 2.")])
def test_a_sequence_that_cannot_be_shared_equally_is_refused(length, remedy):
    config = Config(data=DataConfig(block_size=length))
    refuse_uneven_chunks(config, 1)
    with pytest.raises(ConfigError, match=f"data.block_size={length} is not a multiple of 2, .*"):
        refuse_uneven_chunks(config, 2)
    with pytest.raises(ConfigError, match=remedy):
        refuse_uneven_chunks(config, 2)


def test_fp16_with_weights_on_the_cpu_of_gpus_is_refused(launched, states, monkeypatch, tmp_path):
    entries = {"fsdp_offload_params": True, "mixed_precision": "fp16"}
    launched(runs.rehearsal("fsdp_cpu.yaml", tmp_path, 2, **entries), 2)
    init_processes(TIMEOUT)  # on a CPU there is nothing to wait for
    states.clear()

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)

    (sentence,) = sentences(states)
    assert "says fsdp_offload_params: true. With mixed_precision: fp16" in sentence
    assert "mixed_precision to bf16 or no" in sentence


@pytest.mark.parametrize(
    ("capability", "words"),
    [((8, 0), "8.9 (Ada, Hopper) or later, and this is A100"), ((8, 9), None)],
)
def test_fp8_on_a_gpu_without_it_is_refused(monkeypatch, states, capability, words):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    if words is None:
        init_processes(TIMEOUT)
        return
    (sentence,) = sentences(states)
    assert words in sentence
    assert "set mixed_precision: bf16" in sentence


@pytest.mark.parametrize("name", HONOURED)
def test_what_can_be_honoured_passes_and_fsdp_runs_on_cpus(launched, states, tmp_path, name):
    launched(runs.rehearsal("fsdp_cpu.yaml", tmp_path, 2, **HONOURED[name]), 2)
    init_processes(TIMEOUT)
    joined = {"cpu": True, "store": "a store", "rank": 1, "world_size": 2, "timeout": TIMEOUT}
    assert [vars(state) for state in states] == [
        {**joined, "distributed_type": DistributedType.MULTI_GPU, "num_processes": 2}
    ]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_passes_as_it_lies(launched, states, tmp_path, path):
    text = path.read_text()
    processes = int(text.split("num_processes:")[1].split()[0])
    launched(path, processes)
    init_processes(TIMEOUT)
    fsdp = "distributed_type: FSDP" in text
    assert len(states) == (processes > 1)
    kind = DistributedType.MULTI_GPU if fsdp else DistributedType.MULTI_CPU
    assert [state.distributed_type for state in states] == [kind] * len(states)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("False", (False, DistributedType.MULTI_CPU)),  # as it was made
        ("True", (True, DistributedType.MULTI_GPU)),  # which accelerate makes FSDP of
    ],
)
def test_where_there_is_a_gpu_fsdp_is_left_to_accelerate(
    launched, states, monkeypatch, tmp_path, asked, found
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    launched(runs.rehearsal("fsdp_cpu.yaml", tmp_path, 2), 2)
    monkeypatch.setenv("ACCELERATE_USE_CPU", asked)
    init_processes(TIMEOUT)
    assert [(state.cpu, state.distributed_type) for state in states] == [found]


# What a shell exports of other processes, what is named, and what is missing.
LEFT_OVER = [
    (
        {"WORLD_SIZE": "2", "MASTER_ADDR": "a"},
        "WORLD_SIZE=2 and MASTER_ADDR=a",
        "RANK and no LOCAL",
    ),
    ({"LOCAL_RANK": "1", "RANK": "1"}, "RANK=1 and LOCAL_RANK=1", "WORLD_SIZE and no MASTER_ADDR"),
    ({"WORLD_SIZE": ""}, "WORLD_SIZE=", "WORLD_SIZE and no RANK"),
    ({"WORLD_SIZE": "1", "MASTER_ADDR": "a", "RANK": "1"}, None, None),
]


@pytest.mark.parametrize(("variables", "found", "missing"), LEFT_OVER)
def test_what_is_left_of_other_processes_is_refused_or_harmless(
    states, monkeypatch, variables, found, missing
):
    monkeypatch.setattr(launch_file, "launcher", lambda: None)
    monkeypatch.setattr(processes, "launcher", lambda: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if found is None:
        init_processes(TIMEOUT)
        assert is_main_process()
        assert is_one_machine()
        assert states == []
        return
    (sentence,) = sentences(states)
    assert f"the environment has {found}, as for one of several processes, but no {missing}" in (
        sentence
    )
    assert "unset WORLD_SIZE RANK LOCAL_RANK MASTER_ADDR MASTER_PORT" in sentence


def test_a_process_that_nobody_launched_says_what_it_waits_for(launched, monkeypatch, capfd):
    launched("accelerate_configs/ddp_cpu.yaml", 2)
    monkeypatch.setattr(processes, "launcher", lambda: None)
    init_processes(TIMEOUT)
    said = capfd.readouterr().err
    assert "waiting for all 2 processes, which WORLD_SIZE and RANK name." in said


@pytest.fixture
def under_accelerate(monkeypatch, tmp_path):
    """Make this process one that `accelerate launch` has started with these words."""

    def launch(words: str, processes: int = 1, gpu: bool = False) -> None:
        started_by = Launcher(psutil.Process(), ("accelerate", "launch", *words.split()))
        monkeypatch.setattr(launch_file, "launcher", lambda: started_by)
        monkeypatch.setattr(launch_file, "default_config_file", str(tmp_path / "none.yaml"))
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpu)
        monkeypatch.chdir(runs.ROOT)
        if processes > 1:
            name_processes(monkeypatch, processes)

    return launch


SEVERAL = "distributed_type: 'MULTI_CPU'\nnum_processes: 2\nnum_machines: 1\nuse_cpu: true\n"
ALONE = "{}, but starts one process that trains alone. For several, set distributed_type: MULTI_GPU"
# The words of a launch in accelerate_configs/, the processes that it starts, and what is refused.
LAUNCHES = [
    ("train.py", 1, None),
    ("--config_file single_gpu.yaml --cpu train.py", 1, None),
    ("--config_file cpu.yaml train.py --num_processes=2", 1, None),
    ("--config_file fsdp_cpu.yaml --num_processes 3 train.py", 3, None),
    ("--config_file none.yaml train.py", 1, None),  # accelerate says it
    ("--no_such_option train.py", 1, None),
    (
        "--config_file PLACE/MULTI_CPU.yaml train.py train.max_steps=5",
        1,
        ALONE.format("num_processes: 2"),
    ),
    ("--num_processes 2 --config_file cpu.yaml train.py", 1, ALONE.format("num_processes: 2")),
    ("--num_processes=2 train.py", 1, ALONE.format("num_processes: 2")),
    (
        "--config_file ddp_multinode.yaml --machine_rank 1 --cpu train.py",
        1,
        ALONE.format("num_machines: 2 and num_processes: 8"),
    ),
    ("--config_file ddp.yaml train.py", 4, "requests GPUs, but torch finds none. Check the driver"),
    ("--config_file ddp_cpu.yaml train.py", 2, None),
]


@pytest.mark.parametrize(("words", "processes", "sentence"), LAUNCHES)
def test_what_the_launcher_would_ignore_is_refused(
    under_accelerate, states, monkeypatch, tmp_path, words, processes, sentence
):
    (tmp_path / "MULTI_CPU.yaml").write_text(SEVERAL)
    under_accelerate(words.replace("PLACE", str(tmp_path)), processes)
    monkeypatch.chdir(runs.ROOT / "accelerate_configs")
    if sentence is None:
        assert list(launch_file._ignored_by_launcher()) == []
        return
    (said,) = sentences(states)
    assert sentence in said


@pytest.mark.parametrize(
    ("file", "processes", "here", "gpus", "is_refused"),
    [
        ("fsdp.yaml", 4, 4, 1, True),
        ("ddp_multinode.yaml", 8, 4, 2, True),
        ("ddp.yaml", 4, 4, 4, False),
    ],
)
def test_more_processes_than_gpus_are_refused(
    under_accelerate, states, monkeypatch, file, processes, here, gpus, is_refused
):
    under_accelerate(f"--config_file accelerate_configs/{file} train.py", processes, gpu=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    if is_refused:
        (said,) = sentences(states)
        assert f"launcher starts {here} processes on this machine, and {gpus} GPUs are vis" in said
        monkeypatch.setattr(launch_file, "launcher", lambda: None)  # each may see one of its own
    assert list(launch_file._too_few_gpus()) == []


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
def test_bf16_is_for_cpus_that_have_it(monkeypatch, asked, has_bf16, gpu, precision):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: bool(gpu))
    monkeypatch.setenv("ACCELERATE_USE_CPU", str(gpu == "hidden"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})

    assert effective_precision() == precision


def test_a_run_on_a_cpu_without_bf16_says_that_it_is_in_float32(small, tmp_path):
    words = ["without", "train.py", *small, "train.max_steps=2", f"run.dir={tmp_path / 'run'}"]
    bf16 = ("--mixed_precision=bf16",)

    result = runs.launch("cpu.yaml", *words, options=bf16, script=runs.ON_CPU)

    assert result.returncode == 0, result.stderr
    (machine,) = (line for line in result.stdout.splitlines() if line.startswith("machine"))
    assert "float32 (this CPU has no bf16 instructions)" in machine


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
