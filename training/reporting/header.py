"""What a run prints before its first and after its last step."""

from __future__ import annotations

import platform
import shlex
import statistics
from functools import cache
from pathlib import Path

import torch
from accelerate import Accelerator

from config.schema import Config
from config.stored import as_plain
from data.corpus import Corpus
from data.documents import Documents
from data.token_file import TokenStream
from model.family import LanguageModel, parameter_count
from model.fp8 import FP8
from model.frozen import full_parameters
from snapshot.config_values import changed_values
from snapshot.disk.state import RunState, loss_in_words
from snapshot.start import Start
from training.distributed.accelerator import (
    effective_precision,
    offloads,
    replicas,
    split_of,
    syncs_each_micro_batch,
)
from training.distributed.launcher import (
    processes_here,
    requested_precision,
    shutdown_timeout,
    started_processes,
)
from training.distributed.sharing import context_size, tensor_size
from training.reporting.console import Console
from training.reporting.curves import CURVES
from training.reporting.report import Report


def print_header(
    console: Console,
    accelerator: Accelerator,
    config: Config,
    corpus: Corpus,
    model: LanguageModel,
    start: Start,
    state: RunState,
) -> None:
    """Print the text, the model, the machine, the step and the snapshot that the run resumes."""
    console.say(f"text      {corpus.info.name}: {text_in_words(corpus)}")
    if corpus.info.is_lossy:
        console.warn(
            f"{corpus.info.lost_in_words}: the tokenizer cannot represent all of this text. Bits "
            "per byte are left out. Byte-level tokenizers represent every text: "
            "data.tokenizer=bpe:8000 or gpt2."
        )
    _print_model(console, config, model, state)
    console.say(f"machine   {machine_line(accelerator)}")
    console.say(f"step      {_step_in_words(accelerator, config, corpus)}")
    console.say(f"run       {config.run.dir}, from {start.reason}")
    for warning in start.warnings:
        console.warn(warning)
    if start.state is not None:
        for change in changed_values(start.state.config, as_plain(config)):
            console.say(f"changed   {change}")
    _print_hints(console, accelerator, config.run.grace_seconds, start.state)
    console.say()


def text_in_words(corpus: Corpus) -> str:
    """How much text there is, also in tokens, and how many tokens are held out."""
    info, held_out = corpus.info, f"{len(corpus.held_out):,}"
    if corpus.marks:
        lost = f"; {info.shortened:,} shortened" * bool(info.shortened)
        lost += f"; {info.left_out:,} left out, too long or without targets" * bool(info.left_out)
        tokens = f"{info.documents:,} conversations in {info.tokens:,} tokens"
        return f"{tokens}, {held_out} held out{lost}"
    if not isinstance(corpus.train, TokenStream | Documents):
        return (
            f"streamed, {info.train_bytes / 1e6:,.1f} MB to train on, "
            f"{held_out} tokens held out for the evaluation"
        )
    tokens = "" if corpus.tokenizer.unit == "character" else f" in {info.tokens:,} tokens"
    size = f"{info.characters:,} characters{tokens}"
    return f"{size}, {held_out} held out"


def _print_model(console: Console, config: Config, model: LanguageModel, state: RunState) -> None:
    """Print the sizes of the model, which parameters are trained, and where it begins."""
    shape, optim = model.config, config.optim
    console.say(
        f"model     {parameter_count(model):,} parameters: {shape.n_layer} layers, {shape.n_head} "
        f"heads, {shape.n_embd} wide, context {shape.block_size}"
    )
    frozen = sum(p.numel() for _, p in full_parameters(model) if not p.requires_grad)
    if frozen:
        key = "optim.freeze" if optim.freeze else "model.lora_rank"
        value = optim.freeze or config.model.lora_rank
        console.say(f"frozen    {frozen:,} of them, by {key}={value}, kept in {state.frozen_dtype}")
    if (base := state.base) is not None:
        what = "its weights" if config.model.architecture is None else "its architecture"
        console.say(f"from      {base} ({shape.family}): {what}, trained in float32")
        console.say(f"optimizer {optim.name}, learning rate {optim.learning_rate:g}")


def _step_in_words(accelerator: Accelerator, config: Config, corpus: Corpus) -> str:
    """The tokens of a step, how processes share them, and how many epochs the run has."""
    info, train, block = corpus.info, config.train, config.data.block_size
    split = split_of(accelerator, train)
    tokens = train.global_batch_size * block
    shared = accelerator.num_processes // split.parts
    who = counted(split.parts, "process")
    if shared > 1:  # which have the same sequences
        who = f"{counted(split.parts, 'group')} of {shared} processes"
    padding = f", {split.padding} of them padding" if split.padding else ""
    epochs = ""
    if isinstance(corpus.train, TokenStream):
        epochs = f" are {train.max_steps * tokens / max(1, info.split):.2g} epochs"
    return (
        f"{tokens:,} tokens: {counted(split.micro_batch, 'sequence')} x {who} x "
        f"{split.accumulation} accumulated{padding}; {train.max_steps:,} steps{epochs}"
    )


def machine_line(accelerator: Accelerator) -> str:
    """Processes, device, precision and threads: a line of the header."""
    count, device = accelerator.num_processes, accelerator.device
    precision = {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    if effective_precision() == "no":
        precision += " (this CPU has no bf16 instructions)"
    if requested_precision() == FP8:
        precision += f" with products in fp8{' (emulated)' * (device.type == 'cpu')}"
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    if device.type == "cpu":
        on = f"CPU with {counted(torch.get_num_threads(), 'thread')}{' each' * (count > 1)}"
    parts = [counted(count, "process"), on, precision]
    if count > 1:
        parts.append(_strategy(accelerator))
    backend = accelerator.state.dynamo_plugin.backend.value.lower()
    if backend != "no":
        whole = not accelerator.state.dynamo_plugin.use_regional_compilation
        parts.append(f"compiled {'whole' if whole else 'by block'} with {backend}")
    return ", ".join(parts)


def computed_on(accelerator: Accelerator) -> str:
    """What the last bits of a step depend on: a resume is exact where these words are equal."""
    processor = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{machine_line(accelerator)}; {processor}; torch {torch.__version__}"


@cache
def _processor() -> str:
    """The name of the processor. Read once, as Linux takes long to list many cores."""
    try:
        facts = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in facts if "model name" in line)
    except (OSError, StopIteration):  # not Linux, or not x86
        return platform.processor() or platform.machine()


def _strategy(accelerator: Accelerator) -> str:
    """'DDP' or 'FSDP', with the special options of the accelerate config file."""
    if not accelerator.is_fsdp2:
        machines = started_processes() // processes_here()
        return "DDP" if machines == 1 else f"DDP over {counted(machines, 'machine')}"
    several, shared = accelerator.gradient_accumulation_steps > 1, context_size(accelerator)
    name = "FSDP"
    if (copies := replicas(accelerator)) > 1:
        shards = shared * accelerator.parallelism_config.dp_shard_size
        name += f" ({counted(copies, 'replica')} of {shards} shards)"
    if several and not syncs_each_micro_batch(accelerator):
        name += ", whole weights and gradients over a step's micro-batches"
    elif not accelerator.state.fsdp_plugin.reshard_after_forward:
        name += ", gathered until the backward pass"
    if offloads(accelerator):
        name += ", weights and optimizer on the CPU"
    if shared > 1:
        name += f", each sequence shared by {shared} processes"
    if (sharing := tensor_size(accelerator)) > 1:
        name += f", each matrix shared by {sharing} processes"
    return name


def _print_hints(
    console: Console, accelerator: Accelerator, grace: float, before: RunState | None
) -> None:
    """Print what may cut the last snapshot, and whether a resume may have other bits."""
    if grace > shutdown_timeout():
        console.say(
            f"hint      the launcher kills its processes {shutdown_timeout():g} seconds after a "
            f"signal, before run.grace_seconds={grace:g}. Set TORCH_ELASTIC_SHUTDOWN_TIMEOUT="
            f"{grace + 5:.0f} in its environment."
        )
    now = computed_on(accelerator)
    if before is not None and before.computed_on not in (None, now):
        console.say(
            f"hint      now computed on {now}, before on {before.computed_on}: the run resumes "
            "from the same state, but the last bits of sums may differ."
        )


def print_stop(console: Console, config: Config, report: Report, reason: str) -> None:
    """Print that the run ended before its last step, why, and what it resumes from."""
    console.close()
    console.say(
        f"\nstopped   by {reason} at step {console.step:,} of {config.train.max_steps:,}; "
        f"the same command resumes there"
    )
    console.say(f"snapshot  {report.last_snapshot}")


def print_end(
    console: Console,
    config: Config,
    corpus: Corpus,
    state: RunState,
    held_out: float,
    report: Report,
) -> None:
    """Print the result of the run, and what to do next."""
    console.close()
    steps = config.train.max_steps
    loss = loss_in_words(state.data, held_out)
    console.say(f"\nheld out  {loss}")
    cost = ""
    if report.stall_seconds:  # no snapshot was written where only an evaluation was left
        stall = statistics.median(report.stall_seconds)
        durable = statistics.median(report.durable_seconds)
        cost = f"; each stalls training for {stall:.2f} s and is durable after {durable:.2f} s"
    console.say(f"snapshot  {report.last_snapshot}{cost}")
    console.say(f"curves    {Path(config.run.dir) / CURVES}")
    if report.skipped:
        console.say(f"skipped   {report.skipped} of {steps:,} updates, which overflowed fp16")
    command = ["python", "sample.py", config.run.dir, *(["--chat"] if corpus.marks else [])]
    console.say("\nGenerate text:     " + shlex.join(command))
    console.say(f"Continue training: the same command with train.max_steps={2 * steps}")


def counted(number: int, noun: str) -> str:
    """'1 process', '2 processes', '2 threads'."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"
