"""Train a GPT on text. The whole run, top to bottom; start it with `accelerate launch train.py`.

The same command again resumes from the newest snapshot (checkpoint).
B: sequences of a micro-batch on one process. T: tokens of a sequence.
"""

from __future__ import annotations

import config.early_help  # noqa: F401  # isort: skip  # answers --help without torch
import torch

from config.schema import Config, gpt_config
from data.loader import HeldOutBatches, StepBatches, window_loader, windows_of
from model.families import build_empty
from model.head import IGNORED
from training.distributed.accelerator import (
    Accelerator,
    accelerator_options,
    configure_wrapping,
    grads_in_buckets,
    split_of,
)
from training.evaluation import held_out_loss, sample_text
from training.run.command import run_command
from training.run.session import Session
from training.run.text import prepare_text
from training.step import freeze, learning_rate_at, make_optimizer, reseed, set_learning_rate


def main(config: Config, session: Session) -> int:
    """Execute one attempt of a run. Every process calls this; `session` handles all but updates."""
    data, optim, train = config.data, config.optim, config.train
    # Processes, devices, precision: from the accelerate config file. Accumulation is derived.
    accelerator = Accelerator(**accelerator_options(config))
    session.begin(accelerator)
    split = split_of(accelerator, train)  # of a step's sequences among processes and micro-batches
    accumulation = split.accumulation

    # The snapshot that this attempt resumes from, and the text at the revisions that it names.
    session.choose_start()
    corpus = prepare_text(accelerator, config, session.start, session.pretrained)
    session.check_text(corpus)

    # The model: our own, or one of the Hub. It has no values before `session.restore`.
    if session.pretrained is None:
        model = build_empty(gpt_config(config, corpus.tokenizer.vocab_size))
    else:
        model = session.pretrained.build(session.start, session.state, corpus.tokenizer)
    freeze(model, optim.freeze)
    session.open(model)
    if session.finished:
        return session.end()
    configure_wrapping(accelerator, model, config.run)
    optimizer = make_optimizer(model, optim, accelerator.device, accelerator.mixed_precision)

    # The training windows are a function of seed and step. The held-out windows never change.
    windows = windows_of(corpus.train, data.block_size, IGNORED, session.packs(model))
    order = windows.order(train.seed, train.global_batch_size)
    pinned = accelerator.device.type == "cuda"
    train_batches = StepBatches(order, split, session.next_step)
    train_loader = window_loader(windows, train_batches, pinned)
    at_most = None if train.eval_batches is None else train.eval_batches * train.global_batch_size
    held_out = windows_of(corpus.held_out, data.block_size, IGNORED, session.packs(model))
    held_out_batches = HeldOutBatches(held_out, at_most, split.global_micro_batch)
    held_out_loader = window_loader(held_out, held_out_batches, pinned)

    model, optimizer, train_loader, held_out_loader = accelerator.prepare(
        model, optimizer, train_loader, held_out_loader
    )
    session.restore(model, optimizer, held_out_loader)
    set_to_none = not grads_in_buckets(model)  # DDP's gradients are views of its buckets
    batches = session.report.clock.timed(train_loader)  # its iterator
    process = accelerator.seed_index
    for step in session.steps():
        reseed(train.seed, step, process)  # so dropout survives a restart
        rate = learning_rate_at(step, optim, train.max_steps)
        set_learning_rate(optimizer, rate)
        step_loss = torch.zeros((), device=accelerator.device)
        for _ in range(accumulation):
            batch, weight = next(batches)  # inputs and targets, each (B, T)
            with accelerator.accumulate(model):
                loss = model(*batch) * weight  # so every target of the step weighs the same
                accelerator.backward(loss)  # divides the loss by `accumulation`
                step_loss += loss.detach() / accumulation
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
                optimizer.step()  # waits until the pending snapshot is written
                optimizer.zero_grad(set_to_none)
        epoch = order.epoch_of(step * train.global_batch_size - 1)
        due = session.finish_step(step, epoch, rate, step_loss, norm)  # name=x: another metric

        # What is due. The snapshot comes first, so a failing evaluation cannot prevent it.
        if due.save:
            session.save()
        if due.evaluate:
            session.report_evaluation(held_out_loss(accelerator, model, held_out_loader))
        if due.sample:
            session.report_sample(sample_text(accelerator, model, corpus, seed=step))
    return session.end()


if __name__ == "__main__":
    run_command(main)
