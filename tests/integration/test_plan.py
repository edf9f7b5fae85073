"""plan.py: what it predicts is what a run measures, and its table says what it must."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from accelerate.utils.operations import ConvertOutputsToFp32
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import families
import plan as plan_script
import runs
from config.compose import load_config
from config.schema import OptimConfig
from model.causal_lm import CausalLMConfig
from model.families import build_model
from model.family import ModelConfig
from model.frozen import keep_frozen
from model.gpt import GPTConfig
from model.lora import Lora
from planning.allocation_log import LiveBytes
from planning.estimate import peak_bytes
from planning.fake_trace import DTYPES, Shape, traced_update
from planning.fits import (
    OFFLOADED,
    Fit,
    Strategy,
    advise,
    largest_that_fits,
    mesh_strategy,
    strategies,
)
from planning.kernels import cuda_kernels
from tracked import tracked
from training.step import make_optimizer

TINY = GPTConfig(103, 64, n_layer=4, n_head=4, n_embd=128)
CLAIM = ["data.block_size=1024", "train.global_batch_size=64", "--vocab-size", "50257"]
TWO_OF_24 = [*CLAIM, "--processes", "2", "--memory", "24"]


def planned_fits(*words: str) -> dict[str, Fit]:
    """The rows of the table by the names of the strategies."""
    options = plan_script.parse([*words])
    fits, _, _ = plan_script.planned(options, load_config(options.overrides))
    return {row.strategy.name: row for row in fits}


def counted(config: ModelConfig, batch: int, precision: str, frozen_dtype: str = "float32") -> int:
    """The peak of a real update of two micro-batches, after one that made the optimizer's state."""
    torch.manual_seed(0)
    model = build_model(config)
    keep_frozen(model, frozen_dtype)
    if precision != "no":  # as accelerate does it
        autocast = torch.autocast("cpu", DTYPES[precision])
        model.forward = ConvertOutputsToFp32(autocast(model.forward))
    optimizer = make_optimizer(model, OptimConfig(), torch.device("cpu"), "no")
    ids = torch.randint(config.vocab_size, (batch, config.block_size))
    tracker = LiveBytes()
    tracker.mark(model.parameters(), "parameters")
    with tracker:
        for update in range(2):
            tracker.place = (update,)
            for _ in range(2):
                loss = model(ids, ids)
                (loss.float() / 2).backward()
                del loss
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    rows = zip(tracker.totals(), tracker.places, strict=True)
    return max(int(total.sum()) for total, place in rows if place == (1,))


def planned(config: ModelConfig, batch: int, shape: Shape) -> float:
    return peak_bytes(config, shape, batch, accumulating=True)


PLAIN, FULL = (0.0, "no", False), (0.1, "bf16", True)
MARKS = {PLAIN: [], FULL: [pytest.mark.thorough]}
REAL_RUNS = [
    pytest.param(*way, marks=MARKS.get(way, [pytest.mark.slow]))
    for way in product((0.0, 0.1), ("no", "bf16"), (False, True))
]


@pytest.mark.parametrize(("dropout", "precision", "checkpointing"), REAL_RUNS)
def test_the_predicted_peak_is_the_one_of_a_real_update(dropout, precision, checkpointing):
    config = GPTConfig(103, 64, 3, 4, 64, dropout, checkpointing)
    predicted = planned(config, 3, Shape("cpu", precision))
    assert predicted == pytest.approx(counted(config, 3, precision), rel=0.01)


def a_model_of(family: str, **entries: object) -> ModelConfig:
    """A model of transformers, with windows of its whole context."""
    return CausalLMConfig.read({**families.FAMILIES[family], **entries})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "frozen_dtype"),
    [
        ("llama", "no", "float32"),
        ("qwen3", "bf16", "float32"),
        *product(["llama with adapters"], ("no", "bf16"), ("float32", "bf16")),
    ],
)
def test_the_peak_of_a_model_of_the_hub_is_predicted(family, precision, frozen_dtype):
    """The update of a model of seven layers, from the traces of models of five and six."""
    config = a_model_of(family.split(" with ")[0], num_hidden_layers=7)
    if family.endswith("adapters"):
        config = replace(config, lora=Lora(8, 16, dropout=0.1))
    predicted = planned(config, 3, Shape("cpu", precision, frozen_dtype=frozen_dtype))
    assert predicted == pytest.approx(counted(config, 3, precision, frozen_dtype), rel=0.02)


@pytest.mark.thorough
def test_of_many_chunks_of_a_loss_a_few_are_traced(monkeypatch):
    """The peak is that of all of them, also where processes share the vocabulary."""
    monkeypatch.setattr("model.head.LOGIT_BYTES", 20 * 103 * 4)  # 40 positions of 192
    config = GPTConfig(103, 64, 1, 2, 16)
    shape = Shape("cuda", "bf16", 2, tensor=2)
    few = traced_update(config, 3, shape)
    monkeypatch.setattr("planning.fake_trace.few_chunks", nullcontext)
    every = traced_update(config, 3, shape)
    assert len(few.places) < len(every.places)
    assert (few.totals().max(axis=0) == every.totals().max(axis=0)).all()
    assert few.totals().sum(axis=1).max() == every.totals().sum(axis=1).max()


def test_dropout_on_a_gpu_is_planned_with_one_byte_a_number():
    kept = []
    x = torch.ones(64, 64, requires_grad=True)
    with cuda_kernels(), saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        nn.Dropout(0.1)(x)

    assert sum(one.nbytes for one in kept) == x.numel()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "processes", "shards", "family"),
    [
        ("cpu.yaml", 1, 1, None),
        ("fsdp_cpu.yaml", 2, 2, None),
        ("ddp_cpu.yaml", 2, 1, "llama"),
        ("fsdp_cpu.yaml", 2, 2, "llama"),
    ],
)
def test_the_predicted_peak_is_the_one_of_train_py(
    small, tmp_path, config, processes, shards, family
):
    """In the real program under the real launcher, counted in each process."""
    words = [*small, "model.n_layer=3", "model.n_embd=64", "data.block_size=64"]
    model = GPTConfig(103, 64, 3, 2, 64)
    if family is not None:
        base = families.make(family, tmp_path / "base", num_hidden_layers=7)
        words = families.words(small, base, "data.block_size=48")
        model = a_model_of(family, num_hidden_layers=7)
    command = runs.launch_command(runs.rehearsal(config, tmp_path, processes), *words)
    at = command.index(str(runs.ROOT / "train.py"))
    counted_run = runs.ROOT / "tests" / "support" / "counted_run.py"
    command[at : at + 1] = [str(counted_run), str(tmp_path)]
    command += ["train.micro_batch_size=2", f"run.dir={tmp_path / 'run'}"]
    result = runs.run(command)
    assert result.returncode == 0, result.stderr
    found = [json.loads((tmp_path / f"{n}.json").read_text()) for n in range(processes)]
    assert [process["processes"] for process in found] == [processes] * processes
    if family is None:
        written = tmp_path / "run" / "snapshots" / "step-00000030" / "config.json"
        model = replace(model, vocab_size=json.loads(written.read_text())["vocab_size"])
    asked = (model, Shape("cpu", "no", processes, shards), 2, True)
    print(f"{peak_bytes(*asked)} bytes predicted, {[one['peak'] for one in found]} counted")
    assert peak_bytes(*asked) == pytest.approx(max(one["peak"] for one in found), rel=0.02)
    for kind in OFFLOADED:
        assert peak_bytes(*asked, [kind]) == pytest.approx(found[0][kind], rel=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "most"),
    [
        (Shape("cuda", "bf16", 4, 2), dict.fromkeys(OFFLOADED, 1.05 / 2)),
        (Shape("cuda", "bf16", 4, 4), dict.fromkeys(OFFLOADED, 1.05 / 4)),
        (Shape("cuda", "bf16", 8, 8, context=4), {"activations": 0.5}),
        (
            Shape("cuda", "bf16", 4, 1, tensor=4),
            {**dict.fromkeys(OFFLOADED, 0.3), "activations": 0.5},
        ),
    ],
)
def test_processes_share_what_one_has_alone(shape, most):
    """Beside padding, norms and positions, of which each has all."""
    sizes = replace(TINY, block_size=256)
    for kind, share in most.items():
        alone = peak_bytes(sizes, Shape("cuda", "bf16"), 4, True, [kind])
        assert peak_bytes(sizes, shape, 4, True, [kind]) < share * alone


def test_the_table_names_a_shipped_config_for_each_strategy():
    shown = set()
    for device in ("cuda", "cpu"):
        for processes, machines in ((1, 1), (4, 1), (8, 2)):
            shape = Shape(device, "bf16", processes)
            shown |= {strategy.file for strategy in strategies(TINY, shape, machines)}
        for processes, sizes in ((4, {"context": 2}), (4, {"tensor": 2}), (2, {"tensor": 2})):
            shape = Shape(device, "bf16", processes, **sizes)
            shown |= {strategy.file for strategy in strategies(TINY, shape, 1)}
    shipped = {path.name for path in tracked("accelerate_configs")}
    assert shown == shipped - {"fsdp_hybrid_cpu.yaml"}  # nothing is gained by it on one CPU


def test_the_command_of_a_mesh_has_all_its_sizes():
    shape = Shape("cuda", "bf16", 64, 4, context=2, tensor=2)
    strategy = mesh_strategy(TINY, shape, 8)
    assert strategy.name == "replicate 8 x shard 2 x cp 2 x tp 2"
    fit = Fit(strategy, {}, 0.0, 0.0, 0, fits=True)
    advice, code = advise([fit], None, 8, ["run.name=x y"])
    assert code == 0
    assert "accelerate_configs/fsdp_hybrid.yaml" in advice
    for option in ("dp_replicate_size=8", "dp_shard_size=2", "cp_size=2", "tp_size=2"):
        assert f"--parallelism_config_{option}" in advice
    assert "--num_processes=64 --num_machines=8" in advice
    assert advice.endswith("train.py 'run.name=x y'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "shape", "groups"),
    [
        ("ddp_cpu.yaml", Shape(processes=2), []),
        ("fsdp_cpu.yaml", Shape(processes=2, shards=2), []),
        ("fsdp_hybrid.yaml", Shape(processes=4, shards=2), ["dp_replicate", "dp_shard_cp"]),
        ("cp_cpu.yaml", Shape(processes=2, shards=2, context=2), []),
        ("cp.yaml", Shape(processes=4, shards=4, context=2), ["cp"]),
        ("tp_cpu.yaml", Shape(processes=2, tensor=2), []),
        ("tp.yaml", Shape(processes=4, shards=2, tensor=2), ["dp_shard_cp", "tp"]),
    ],
)
def test_a_run_has_as_many_communicators_as_planned(small, tmp_path, config, shape, groups):
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2} if "hybrid" in config else {}
    entries = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    file = runs.rehearsal(config, tmp_path, shape.processes, dynamo_backend="NO", **entries)
    words = [*small, "train.max_steps=3", "data.block_size=32", f"run.dir={tmp_path / 'run'}"]
    result = runs.run(runs.launch_command(file, "groups", *words, script=runs.ALTERED))
    assert result.returncode == 0, result.stderr
    assert (
        f"groups {' '.join(['default_pg', *(f'mesh_{one}' for one in groups)])}\n" in result.stdout
    )
    assert Strategy("", "", TINY, shape).communicators == 1 + len(groups)


@pytest.mark.parametrize("memory", [50, 151, 152, 300, 1e9])
def test_the_largest_micro_batch_is_looked_for_where_a_line_crosses_the_memory(memory):
    """Also where the line has a bend, with few questions: each takes two traces."""
    asked = []

    def needed(sequences):
        asked.append(sequences)
        return 101 + 3 * sequences + 7 * min(sequences, 5)

    most = largest_that_fits(needed, memory)
    assert most == 0 or needed(most) <= memory
    assert most == 4096 or needed(most + 1) > memory
    assert len(asked) <= 8


@pytest.mark.thorough
def test_the_plan_says_what_fits_and_what_to_run(capsys):
    assert plan_script.main(["--processes", "2", "--memory", "8"]) == 0
    out = capsys.readouterr().out
    assert "It fits: accelerate launch --config_file accelerate_configs/ddp.yaml --num_proc" in out
    assert "snapshot.keep=3" in out
    assert re.search(r"FSDP, offload keeps \d\.\d\d GiB a process in the machine's memory", out)
    for head in ("weights", "gradients", "optimizer", "activations", "peak"):
        assert head in out


@pytest.mark.thorough
def test_nothing_that_fits_is_exit_code_3_with_a_remedy(capsys):
    assert plan_script.main(["model=gpt2", "--memory", "1"]) == 3
    out = capsys.readouterr().out
    assert "Nothing fits" in out
    assert "model.activation_checkpointing=true" in out
    words = ["train.micro_batch_size=12", "data.block_size=1024", "--memory", "1"]
    assert plan_script.main(words) == 3
    out = capsys.readouterr().out
    assert "train.micro_batch_size=12 does not fit. one process fits" in out


WRONG = {
    "model=gtp2": "nearest is gpt2",
    "--processes 3 --machines 2": "--processes 3 is not a multiple of --machines 2",
    "--processes 3 --context 2": "--processes 3 is not a multiple of --context 2",
    "--processes 6 --tensor 4": "--processes 6 is not a multiple of --tensor 4",
    "--processes 3 --tensor 3": "--tensor 3, but the model has 4",
    "--processes 2 --tensor 2 --precision fp16": "fp16 cannot be used where processes share matri",
    "--processes 8 --context 8": "--context 8, and the number of heads in attention on each proce",
    "--gpu h1000": "invalid choice: 'h1000' (choose from",
    "--gpu h100": "--memory: not allowed with argument --gpu",
    **{f"--memory={text}": f"--memory: {text} is not " for text in ("", "24GB", "0", "nan")},
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_input_gets_a_sentence_and_exit_code_2(words, capsys):
    try:
        code = plan_script.main([*words.split(), *["--memory=8"] * ("--memory" not in words)])
    except SystemExit as ended:  # by argparse
        code = ended.code
    assert code == 2
    assert WRONG[words] in capsys.readouterr().err


def test_without_a_gpu_the_memory_is_asked_for(capsys):
    assert plan_script.memory_of(plan_script.parse(["--gpu", "h100"])) == 79.15
    assert plan_script.main([]) == 2
    assert "no GPU was found. Name one, such as --gpu h100" in capsys.readouterr().err
