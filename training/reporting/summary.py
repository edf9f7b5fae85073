"""The lines that a run prints before its first and after its last step."""

from __future__ import annotations

import math
import shlex
import statistics
from pathlib import Path

from accelerate import Accelerator

from config.other_models import rate_by_size
from config.schema import Config, OptimConfig
from config.stored import as_plain
from data.corpus import Corpus
from data.documents import Documents
from data.token_file import TokenStream
from model.family import LanguageModel, parameter_count
from model.lora import experts_of
from model.nf4 import full_parameters
from snapshot.config_values import changed_values
from snapshot.disk.state import RunState
from snapshot.start import Start
from training.distributed.accelerator import split_of, why_not_compiled
from training.distributed.launcher import shutdown_timeout
from training.reporting.console import Console
from training.reporting.machine import computed_on, counted, machine_hints, machine_line
from training.reporting.report import Report
from training.reporting.timing import PhaseClock
from training.step import learning_rate_at

STEEP = 1.5
"""A rise of the learning rate by this factor is worth a hint."""


def print_header(
    console: Console,
    accelerator: Accelerator,
    config: Config,
    corpus: Corpus,
    model: LanguageModel,
    start: Start,
    state: RunState,
    is_untied: bool = False,
) -> None:
    """Print the text, the model, the machine, the step and the snapshot that the run resumes.

    `is_untied`: the output layer of the base has weights of its own, although config.json ties it.
    """
    info, train = corpus.info, config.train
    batch = train.global_batch_size
    split = split_of(accelerator, train)
    shared = accelerator.num_processes // split.parts
    who = counted(split.parts, "process")
    if shared > 1:  # which have the same sequences
        who = f"{counted(split.parts, 'group')} of {shared} processes"
    padding = f", {split.padding} of them padding" if split.padding else ""
    block = config.data.block_size
    steps = f"{train.max_steps:,} steps"
    if isinstance(corpus.train, TokenStream):
        steps += f" are {train.max_steps * batch * block / max(1, info.split):.2g} epochs"
    elif not isinstance(corpus.train, Documents):
        text_bytes = train.max_steps * batch * block * info.held_out_bytes / info.held_out_targets
        steps += f" are about {text_bytes / max(1, info.train_bytes):.2g} epochs"
    _print_text(console, corpus)
    _print_model(console, config, model, state, is_untied)
    console.say(f"machine   {machine_line(accelerator, config.run)}")
    if model.fp8 is not None:
        console.say(f"fp8       {model.fp8.as_words()}")
    console.say(
        f"step      {batch * block:,} tokens: {counted(split.micro_batch, 'sequence')} x "
        f"{who} x {split.accumulation} accumulated{padding}; {steps}"
    )
    console.say(f"run       {config.run.dir}, from {start.reason}")
    for warning in start.warnings:
        console.warn(warning)
    if start.state is not None:
        _print_changes(console, start.state, config, computed_on(accelerator, config.run))
    for hint in machine_hints(accelerator):
        console.say(f"hint      {hint}")
    reason = why_not_compiled()
    if reason is not None:
        console.say(f"hint      not compiled, although the accelerate config file asks: {reason}.")
    grace = config.run.grace_seconds
    if grace > shutdown_timeout():
        console.warn(
            f"run.grace_seconds={grace:g}, but the launcher kills its processes "
            f"{shutdown_timeout():g} seconds after a signal. Set "
            f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={grace + 5:.0f} in its environment."
        )
    console.say()


def _print_changes(console: Console, before: RunState, config: Config, now: str) -> None:
    """Print what differs from the snapshot: keys, the machine, the learning rate."""
    for change in changed_values(before.config, as_plain(config)):
        console.say(f"changed   {change}")
    if before.computed_on not in (None, now):
        console.say(
            f"hint      now computed on {now}, before on {before.computed_on}: the run resumes "
            "from the same state, but the last bits of sums may differ."
        )
    if jump := rate_jump(before, config):
        console.say(f"hint      {jump}")


def _print_text(console: Console, corpus: Corpus) -> None:
    """Print what the text is, and each source of a streamed one."""
    console.say(f"text      {corpus.info.name}: {text_in_words(corpus)}")
    if not isinstance(corpus.train, TokenStream | Documents):
        for source in corpus.train.in_words:
            console.say(f"          {source}")
    _say_what_is_lost(console, corpus)


def _say_what_is_lost(console: Console, corpus: Corpus) -> None:
    """Print what part of the text is not trained on, because its tokens cannot express it."""
    lost = corpus.info.lost_in_words
    if lost is not None and corpus.info.is_lossy:
        console.warn(
            f"{lost}: the tokenizer cannot represent all of this text. Bits per byte are left out, "
            "as they would be those of another text. Byte-level tokenizers represent every text: "
            "data.tokenizer=bpe:8000 or gpt2."
        )
    elif lost is not None:
        console.say(f"          {lost}")
    for name, count in corpus.info.unwritten.items():
        have = "conversation has" if count == 1 else "conversations have"
        console.warn(
            f"{count:,} {have} {name}, which the chat template never writes: it is not trained on."
        )


def _print_model(
    console: Console, config: Config, model: LanguageModel, state: RunState, is_untied: bool
) -> None:
    """Print the sizes of the model, which parameters are trained, and where it begins."""
    shape = model.config
    console.say(
        f"model     {parameter_count(model):,} parameters: {shape.n_layer} layers, {shape.n_head} "
        f"heads, {shape.n_embd} wide, context {shape.block_size}"
    )
    kept = [one for _, one in full_parameters(model) if not one.requires_grad]
    if frozen := sum(parameter.numel() for parameter in kept):
        key = "optim.freeze" if config.optim.freeze else "model.lora_rank"
        value = config.optim.freeze or config.model.lora_rank
        console.say(f"frozen    {frozen:,} of them, by {key}={value}, kept in {state.frozen_dtype}")
    if config.model.lora_rank is not None and (experts := sum(experts_of(model.blocks).values())):
        console.say(f"          {experts:,} of these are of experts, which get no adapters")
    if (base := state.base) is not None:
        what = "its weights" if config.model.architecture is None else "its architecture"
        console.say(f"from      {base} ({shape.family}): {what}, trained in float32")
        if is_untied:
            console.say(
                "          its output layer differs from the embedding, to which its config.json "
                "ties it: not tied, as in transformers"
            )
        optim = config.optim
        of_size = rate_by_size(config, model.layout().size_without_output())
        rate = f"{optim.learning_rate:g}" + ", by its size" * (optim.learning_rate == of_size)
        console.say(f"optimizer {optim.name}, learning rate {rate}; optim.* changes it")


def text_in_words(corpus: Corpus) -> str:
    """How much text there is, also in tokens, and how many tokens are held out."""
    info, tokenizer = corpus.info, corpus.tokenizer
    if corpus.marks:
        lost = f"; {info.shortened:,} shortened" * bool(info.shortened)
        lost += f"; {info.left_out:,} left out, too long or without a reply" * bool(info.left_out)
        return (
            f"{info.documents:,} conversations in {info.tokens:,} tokens, "
            f"{len(corpus.held_out):,} held out{lost}"
        )
    if not isinstance(corpus.train, TokenStream | Documents):
        text_bytes = info.train_bytes
        return (
            f"streamed, {text_bytes / 1e6:,.1f} MB to train on, "
            f"{len(corpus.held_out):,} tokens held out for the evaluation"
        )
    tokens = "" if tokenizer.unit == "character" else f" in {info.tokens:,} tokens"
    return (
        f"{info.characters:,} characters{tokens}, {info.different:,} different, "
        f"{len(corpus.held_out):,} held out"
    )


def loss_text(loss: float, corpus: Corpus) -> str:
    """A loss in nats per token and in bits per byte, which any tokenizer can be compared by.

    With a tokenizer of characters, also in bits per character.
    """
    per_byte = corpus.info.bits_per_byte(loss)
    words = "" if per_byte is None else f", {per_byte:.4f} bits per byte"
    if corpus.tokenizer.unit == "character":
        return f"{loss:.4f} nats, {loss / math.log(2):.4f} bits per character{words}"
    return f"{loss:.4f} nats per token{words}"


def _evaluated(config: Config, corpus: Corpus) -> str:
    """What the held-out loss is a mean over."""
    train = config.train
    if isinstance(corpus.held_out, Documents):
        return "the held-out documents"
    evaluated = everything = len(corpus.held_out) - 1
    if train.eval_batches is not None:
        block = config.data.block_size
        evaluated = min(everything, train.eval_batches * train.global_batch_size * block)
    part = "all" if evaluated == everything else f"{evaluated:,} of"
    return f"{part} {everything:,} held-out {corpus.tokenizer.unit}s"


def print_stop(console: Console, config: Config, report: Report, reason: str) -> None:
    """Print that the run ended before its last step, why, and what it resumes from."""
    console.close()
    console.say()
    console.say(
        f"stopped   by {reason} at step {console.step:,} of {config.train.max_steps:,}; "
        f"the same command resumes there"
    )
    console.say(f"snapshot  {report.last_snapshot}")


def print_times(console: Console, clock: PhaseClock) -> None:
    """Print where the time of this attempt went."""
    console.say()
    for number, line in enumerate(clock.table()):
        console.say(f"{'' if number else 'time':<10}{line}")


def print_finished(console: Console, step: int) -> None:
    """Print that the run had taken all of its steps before this attempt."""
    console.close()
    console.say(f"The run is finished at step {step}. A larger train.max_steps extends it.")


def print_end(
    console: Console,
    config: Config,
    corpus: Corpus,
    held_out: float,
    report: Report,
) -> None:
    """Print the result of the run, and what to do next."""
    console.close()
    train = config.train
    console.say()
    console.say(f"held out  {loss_text(held_out, corpus)}, over {_evaluated(config, corpus)}")
    cost = ""
    if report.stall_seconds:  # no snapshot was written where only an evaluation was left
        stall = statistics.median(report.stall_seconds)
        durable = statistics.median(report.durable_seconds)
        cost = f"; each stalls training for {stall:.2f} s and is durable after {durable:.2f} s"
    console.say(f"snapshot  {report.last_snapshot}{cost}")
    console.say(f"curves    {Path(config.run.dir) / 'curves.png'}")
    if report.skipped:
        updates = f"{report.skipped} of {train.max_steps:,} updates"
        console.say(f"skipped   {updates}, which overflowed fp16")
    console.say()
    command = ["python", "sample.py", config.run.dir, *(["--chat"] if corpus.marks else [])]
    console.say("Generate text:     " + shlex.join(command))
    console.say(f"Continue training: the same command with train.max_steps={2 * train.max_steps}")


def rate_jump(state: RunState, config: Config) -> str | None:
    """A hint if the next learning rate is much higher than the last one.

    The schedule spans all steps. With more steps, a finished run is back in the middle of the
    cosine, or in the stable phase.
    """
    try:
        before = OptimConfig(**state.config["optim"])
        steps_before = state.config["train"]["max_steps"]
        last = learning_rate_at(state.step, before, steps_before)
    except (KeyError, TypeError, ValueError, ArithmeticError):  # a snapshot of another version
        return None
    optim, steps = config.optim, config.train.max_steps
    rate = learning_rate_at(state.step + 1, optim, steps)
    is_as_planned = (before, steps_before) == (optim, steps)  # a schedule may rise by itself
    if is_as_planned or rate <= STEEP * last:
        return None
    if last == 0:  # no run can be at that rate
        return f"the learning rate rises from 0 to {rate:.2g}."
    return (
        f"the learning rate rises from {last:.2g} to {rate:.2g}, {rate / last:.1f} times; "
        f"optim.learning_rate={last:g} and "
        f"optim.min_learning_rate={min(last, optim.min_learning_rate):g} keep it."
    )
