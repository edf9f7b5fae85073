"""Train a GPT on text. The whole run, top to bottom; start it with `accelerate launch train.py`.

Start it again with the same words and it goes on where it was.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    send_to_device,
)

from config.compose import as_flat
from config.schema import Config, accumulation_steps
from data.loader import HeldOutBatches, StepBatches, Windows, held_out_starts, window_loader
from data.order import BlockOrder
from model.gpt import GPT, IGNORED, GPTConfig, parameter_count
from snapshot.disk.state import restore
from snapshot.resume import refuse_other_run
from training.distributed.agreement import run_on_all, run_on_main
from training.distributed.compiling import dynamo_plugin_for
from training.distributed.environment import fsdp_requested, on_cpu
from training.distributed.launch import (
    REPLICATION,
    configure_precision,
    effective_precision,
    grads_in_buckets,
    init_processes,
    refuse_broken_launch,
)
from training.distributed.timeouts import ProcessGroupTimeouts
from training.evaluation import held_out_loss
from training.exits import EXIT_DONE
from training.memory import keep_freed_memory
from training.optimizer import adamw
from training.out_of_memory import refuse_too_large
from training.reporting.console import Console, computed_on
from training.reporting.report import Report
from training.reporting.summary import print_end, print_header, print_stop
from training.reporting.watchdog import Watchdog
from training.reproducibility import build_gradient_buckets, compute_reproducibly, reseed
from training.run.command import check_tracker, run_command
from training.run.pending_evaluation import evaluation_is_pending
from training.run.saving import Saving
from training.run.signals import Phase, Signals
from training.run.start import agree_on_start, claim_run_dir, open_run, prepare_text, state_at
from training.run.stop import Stop
from training.run.uploading import begin_uploads, finish_uploads
from training.sampling import sample_text
from training.schedule import learning_rate_at, set_learning_rate


def main(config: Config, signals: Signals) -> int:
    """One attempt of a run: from its newest snapshot, or the beginning, to `train.max_steps`.

    Returns the exit code: not 0 where a signal, or the run's own time, ended it before.
    """
    data, train, run_dir = config.data, config.train, Path(config.run.dir)

    # Who computes: what the accelerate config file says. Accumulation follows from it.
    init_processes(timedelta(seconds=config.run.start_timeout_seconds))
    accelerator = Accelerator(
        cpu=on_cpu(),
        mixed_precision=effective_precision(),
        dynamo_plugin=dynamo_plugin_for(config),
        dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            sync_with_dataloader=False,
            sync_each_batch=fsdp_requested(),  # or each process would hold all gradients meanwhile
        ),
        kwargs_handlers=[REPLICATION],
        log_with=check_tracker(config.run.tracker),
        project_dir=str(run_dir),
    )
    refuse_broken_launch(accelerator)
    accumulation = accumulation_steps(train, accelerator.num_processes)
    accelerator.gradient_accumulation_steps = accumulation
    together = train.global_batch_size // accumulation  # sequences in flight, over all processes
    claim_run_dir(accelerator, config)

    # What is trained on, and what this attempt goes on from.
    corpus = prepare_text(accelerator, config)
    start = agree_on_start(accelerator, config)
    state = state_at(start, config, corpus, computed_on(accelerator))
    if start.state is not None:
        refuse_other_run(start.state, state.config, state.data)

    # What is trained. The weights are a function of the seed, whichever process makes them.
    compute_reproducibly()
    keep_freed_memory()
    reseed(train.seed, step=0, process=0)
    shape = GPTConfig(corpus.tokenizer.vocab_size, data.block_size, **vars(config.model))
    refuse_too_large(shape, in_training=on_cpu() and not fsdp_requested())
    model = GPT(shape)
    console = Console(accelerator.is_main_process, train.max_steps, state.step)
    print_header(console, accelerator, config, corpus, model, start)
    uploads = run_on_main(accelerator, lambda: begin_uploads(console, config, start, state))
    pending = evaluation_is_pending(accelerator, console, config, start, state)
    if state.step >= train.max_steps and not pending:
        console.say(
            f"The run is finished at step {state.step}. A larger train.max_steps extends it."
        )
        signals.phase = Phase.UPLOADING
        finish_uploads(console, config, uploads, signals)
        return EXIT_DONE
    optimizer = adamw(model, config.optim, accelerator.device)

    # The order of the text is a function of seed and step; held-out text has its own windows.
    order = BlockOrder(len(corpus.train), data.block_size, train.seed)
    pinned = accelerator.device.type == "cuda"
    train_loader = window_loader(
        Windows(corpus.train, data.block_size, IGNORED),
        StepBatches(order, train.global_batch_size, together, first_step=state.step + 1),
        data.num_workers,
        pinned,
    )
    at_most = None if train.eval_batches is None else train.eval_batches * train.global_batch_size
    held_out_windows = Windows(corpus.held_out, data.block_size, IGNORED)
    starts = held_out_starts(len(corpus.held_out), data.block_size, at_most)
    held_out_loader = window_loader(
        held_out_windows, HeldOutBatches(starts, together), pinned=pinned
    )
    probe = send_to_device(held_out_windows.__getitems__(starts[:1]), accelerator.device)
    configure_precision(accelerator, model)
    model, optimizer, train_loader, held_out_loader = accelerator.prepare(
        model, optimizer, train_loader, held_out_loader
    )
    bare_model = accelerator.unwrap_model(model, keep_torch_compile=False)
    if start.folder is not None:
        folder = start.folder
        run_on_all(accelerator, lambda: restore(folder, bare_model, optimizer))
        if accelerator.scaler is not None and state.loss_scaler is not None:
            accelerator.scaler.load_state_dict(state.loss_scaler)
    metrics = run_on_main(accelerator, lambda: open_run(run_dir, config, start))
    accelerator.init_trackers(config.run.name, config=as_flat(config))
    report = Report(
        console,
        metrics,
        train.global_batch_size * data.block_size,
        start.kept,
        state.skipped_steps,
        train.max_skipped_steps,
        uploads,
        Watchdog(console, config, parameter_count(bare_model), accelerator.num_processes),
    )
    saving = Saving(accelerator, config, model, optimizer, corpus.tokenizer.save, report)
    batches = iter(train_loader)
    patience = ProcessGroupTimeouts(accelerator, config.run)
    stop = Stop(accelerator, config.run, signals)

    text = None
    first_step = state.step + 1
    model.train()
    kept = grads_in_buckets(model)  # in DDP's buckets, where they are also sent from
    micro_batch = (together // accelerator.num_processes, data.block_size)
    build_gradient_buckets(accelerator, model, optimizer, micro_batch)
    if pending:  # the last attempt was killed between the snapshot and its evaluation
        held_out = held_out_loss(accelerator, model, held_out_loader)
        report.held_out(accelerator, state.step, held_out)
        state.note_held_out(held_out)
        text = sample_text(accelerator, bare_model, corpus.tokenizer, seed=state.step)
        report.resume_clock()
    last = state.step >= train.max_steps
    signals.phase = Phase.TRAINING  # from here on a signal finishes the step and writes a snapshot
    for step in range(first_step, train.max_steps + 1):
        # One update: dropout is reseeded, so that it is the same after a restart.
        reseed(train.seed, step, accelerator.process_index)
        rate = learning_rate_at(step, config.optim, train.max_steps)
        set_learning_rate(optimizer, rate)
        beside = saving.step == step - 1  # a snapshot is written, of the weights before the update
        step_loss = torch.zeros((), device=accelerator.device)
        for _ in range(accumulation):
            inputs, targets = next(batches)  # each (micro-batch, block_size)
            with accelerator.accumulate(model):
                loss = model(inputs, targets)
                accelerator.backward(loss)  # divides by the accumulation
                step_loss += loss.detach() / accumulation
                if accelerator.sync_gradients:
                    if beside:
                        patience.relax()
                        saving.finish()
                    norm = accelerator.clip_grad_norm_(
                        model.parameters(), config.optim.max_grad_norm
                    )
                optimizer.step()
                optimizer.zero_grad(set_to_none=not kept)
        state.step, state.epoch = step, order.epoch_of(step * train.global_batch_size - 1)
        report.add(step, rate, step_loss, norm)

        # What is due after it. The snapshot is first: whatever follows cannot cost it.
        last, stopping = step == train.max_steps, stop.agreed()
        evaluate = last or step % train.eval_every == 0
        sample = last or (train.sample_every > 0 and step % train.sample_every == 0)
        save = last or stopping or step % config.snapshot.every == 0
        due = evaluate or sample or save
        if due or step % train.log_every == 0:
            report.write(accelerator)
        if due:
            report.pause_clock()
            patience.relax()
            # The figures above are of the weights before this step's update.
            report.refuse_broken(step, held_out_loss(accelerator, model, [probe]))
        if save:
            saving.begin(state, text, last, stopping)
        if evaluate:
            held_out = held_out_loss(accelerator, model, held_out_loader)
            report.held_out(accelerator, step, held_out)
            state.note_held_out(held_out)
        if sample:
            text = sample_text(accelerator, bare_model, corpus.tokenizer, seed=step)
            console.sample(step, text)
        if due or beside:
            accelerator.wait_for_everyone()
        if last or stopping:
            break
        if due:
            report.resume_clock()  # speed is that of the steps
        if due or beside or step == first_step:
            patience.tighten()

    signals.phase = Phase.UPLOADING
    if last:
        saving.publish(text, state.best_loss)
        print_end(console, config, corpus, held_out, report)
    else:
        print_stop(console, config, report, stop)
    finish_uploads(console, config, uploads, signals)
    accelerator.wait_for_everyone()  # the first to leave would have the launcher end the others
    accelerator.end_training()
    return EXIT_DONE if last else stop.exit_code


if __name__ == "__main__":
    run_command(main)
