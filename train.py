"""Train a GPT on text. The whole run, top to bottom; start it with `accelerate launch train.py`.

Start it again with the same words and it goes on where it was.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    send_to_device,
)

from data.loader import HeldOutBatches, StepBatches, Windows, held_out_starts, window_loader
from data.order import BlockOrder
from model.gpt import GPT, IGNORED, GPTConfig
from snapshot.resume import refuse_other_run
from snapshot.state import restore
from training.compose import as_flat
from training.config import Config, accumulation_steps
from training.console import Console
from training.distribution import refuse_broken_launch, settle_launch, settle_precision
from training.environment import fsdp_asked
from training.evaluation import held_out_loss
from training.launch import known_tracker, run_command
from training.optimizer import adamw
from training.report import Report
from training.reproducible import compute_reproducibly, reseed, settle_gradient_buckets
from training.sampling import sample_text
from training.saving import save_snapshot
from training.schedule import learning_rate_at, set_learning_rate
from training.start import agree_on_start, claim, open_run, prepare_text, state_at
from training.summary import draw_run, print_end, print_header
from training.together import on_all, on_main
from training.uploading import begin_uploads, finish_uploads, hand_over


def main(config: Config) -> None:
    """One attempt of a run: from its newest snapshot, or the beginning, to `train.max_steps`."""
    data, train, run_dir = config.data, config.train, Path(config.run.dir)

    # Who computes: what the accelerate config file says. Accumulation follows from it.
    timeout = timedelta(seconds=config.run.collective_timeout_seconds)
    settle_launch(timeout)
    accelerator = Accelerator(
        # Said here, because the launcher does not hand use_cpu on to several processes.
        cpu=not torch.accelerator.is_available(),
        dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            sync_with_dataloader=False,
            sync_each_batch=fsdp_asked(),  # or each process would hold all gradients meanwhile
        ),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        log_with=known_tracker(config.run.tracker),
        project_dir=str(run_dir),
    )
    refuse_broken_launch(accelerator)
    accumulation = accumulation_steps(train, accelerator.num_processes)
    accelerator.gradient_accumulation_steps = accumulation
    together = train.global_batch_size // accumulation  # sequences in flight, over all processes
    on_main(accelerator, lambda: claim(run_dir))

    # What is trained on, and what this attempt goes on from.
    corpus = prepare_text(accelerator, config)
    start = agree_on_start(accelerator, config)
    state = state_at(start, config, corpus)
    if start.state is not None:
        refuse_other_run(start.state, state.config, state.data)

    # What is trained. The weights are a function of the seed, whichever process makes them.
    compute_reproducibly()
    reseed(train.seed, step=0, process=0)
    model = GPT(GPTConfig(corpus.tokenizer.vocab_size, data.block_size, **vars(config.model)))
    console = Console(accelerator.is_main_process, train.max_steps, state.step)
    print_header(console, accelerator, config, corpus, model, start)
    uploads = on_main(accelerator, lambda: begin_uploads(console, config, start, state))
    if state.step >= train.max_steps:
        console.say(
            f"The run is finished at step {state.step}. A larger train.max_steps extends it."
        )
        finish_uploads(console, config, uploads)
        return
    optimizer = adamw(model, config.optim, accelerator.device)

    # The order of the text is a function of seed and step; held-out text has its own windows.
    order = BlockOrder(len(corpus.train), data.block_size, train.seed)
    train_loader = window_loader(
        Windows(corpus.train, data.block_size, IGNORED),
        StepBatches(order, train.global_batch_size, together, first_step=state.step + 1),
        data.num_workers,
    )
    at_most = None if train.eval_batches is None else train.eval_batches * train.global_batch_size
    held_out_windows = Windows(corpus.held_out, data.block_size, IGNORED)
    starts = held_out_starts(len(corpus.held_out), data.block_size, at_most)
    held_out_loader = window_loader(held_out_windows, HeldOutBatches(starts, together))
    probe = send_to_device(held_out_windows.__getitems__(starts[:1]), accelerator.device)
    settle_precision(accelerator, model)
    model, optimizer, train_loader, held_out_loader = accelerator.prepare(
        model, optimizer, train_loader, held_out_loader
    )
    bare_model = accelerator.unwrap_model(model, keep_torch_compile=False)
    if start.folder is not None:
        folder = start.folder
        on_all(accelerator, lambda: restore(folder, bare_model, optimizer))
        if accelerator.scaler is not None and state.loss_scaler is not None:
            accelerator.scaler.load_state_dict(state.loss_scaler)
    metrics = on_main(accelerator, lambda: open_run(run_dir, config, start))
    accelerator.init_trackers(config.run.name, config=as_flat(config))
    report = Report(
        console,
        metrics,
        train.global_batch_size * data.block_size,
        start.kept,
        state.skipped_steps,
        train.max_skipped_steps,
        uploads,
    )
    batches = iter(train_loader)

    text = None
    model.train()
    settle_gradient_buckets(accelerator, model, optimizer, data.block_size)
    for step in range(state.step + 1, train.max_steps + 1):
        last = step == train.max_steps

        # One update: dropout is reseeded, so that it is the same after a restart.
        reseed(train.seed, step, accelerator.process_index)
        rate = learning_rate_at(step, config.optim, train.max_steps)
        set_learning_rate(optimizer, rate)
        step_loss = torch.zeros((), device=accelerator.device)
        for _ in range(accumulation):
            inputs, targets = next(batches)  # each (micro-batch, block_size)
            with accelerator.accumulate(model):
                loss = model(inputs, targets)
                accelerator.backward(loss)  # divides by the accumulation
                step_loss += loss.detach() / accumulation
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(
                        model.parameters(), config.optim.max_grad_norm
                    )
                optimizer.step()
                optimizer.zero_grad()
        state.step, state.epoch = step, order.epoch_of(step * train.global_batch_size - 1)
        report.add(step, rate, step_loss, norm)

        # What is due after it. Whatever stops a run comes first: no broken model is saved.
        evaluate = last or step % train.eval_every == 0
        sample = last or (train.sample_every > 0 and step % train.sample_every == 0)
        save = last or step % config.snapshot.every == 0
        if evaluate or sample or save or step % train.log_every == 0:
            report.write(accelerator)
        if evaluate:
            held_out = held_out_loss(accelerator, model, held_out_loader)
            report.held_out(accelerator, step, held_out)
            state.best_loss = min(
                held_out, math.inf if state.best_loss is None else state.best_loss
            )
        if sample:
            text = sample_text(accelerator, bare_model, corpus.tokenizer, seed=step)
            console.sample(step, text)
        if save:
            begun = time.perf_counter()
            if not evaluate:  # the figures above are of the weights before this step's update
                report.refuse_broken(step, held_out_loss(accelerator, model, [probe]))
            saved = save_snapshot(
                accelerator, config, state, model, optimizer, corpus.tokenizer.save, report
            )
            draw_run(console, config)
            hand_over(console, uploads, config, saved, text)
            report.held.append(time.perf_counter() - begun)
        if evaluate or sample or save:
            report.resume_clock()  # speed is that of the steps

    print_end(console, config, corpus, held_out, report)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    finish_uploads(console, config, uploads)


if __name__ == "__main__":
    run_command(main)
