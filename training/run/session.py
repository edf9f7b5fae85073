"""One attempt of a run: everything that surrounds its updates, and all state of the attempt.

The loop in train.py computes. The session opens the run, yields the steps, returns what is due
after each, and ends the attempt. Around each step it handles timeouts, clocks, barriers, signals,
the snapshot that is being written, and the agreement of all processes to stop.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from config.schema import Config, gpt_config, other_model
from config.stored import as_plain
from data.corpus import Corpus
from data.streaming.streamed import StreamedText
from model.family import LanguageModel
from model.frozen import NF4
from snapshot.disk.model import check_described, layout_for, model_errors
from snapshot.disk.state import ONE, SEVERAL, RunState
from snapshot.start import Start
from store.uploader import Uploader
from training.distributed.accelerator import (
    Accelerator,
    check_configuration,
    check_model,
    convert_to_fp8,
    is_compiled,
    split_of,
    unwrapped,
)
from training.distributed.launcher import (
    fit_threads,
    is_local_main_process,
    launcher,
    seconds_since_launch,
)
from training.distributed.processes import ProcessGroupTimeouts, decided_by_main, run_on_all
from training.evaluation import held_out_loss
from training.exits import EXIT_DONE, RESUME, WRITING_SECONDS
from training.memory import check_fits, keep_freed_memory
from training.reporting import header
from training.reporting.console import Console, write_now
from training.reporting.report import Report
from training.reporting.speed import END, EVALUATION, PASSES, UPDATE, UPLOAD, speed_at_peak
from training.reporting.trackers import END_SECONDS, close_trackers, open_trackers
from training.run.pretrained import (
    PretrainedModel,
    choose_frozen_dtype,
    fill_weights,
    find_pretrained,
    generation,
    refuse_nf4,
)
from training.run.records import (
    BestSnapshot,
    begin_records,
    begin_uploads,
    evaluation_is_pending,
    finish_uploads,
)
from training.run.run_dir import RunLock, lock_run_dir
from training.run.start import agree_on_start, refuse_other_run, remove_downloads, state_at
from training.run.stopping import CAUSES, LAST_WORDS_SECONDS, Agreement, Due, Phase, Signals
from training.run.text import begin_stream, data_facts
from training.run.writer import SnapshotWriter
from training.step import build_gradient_buckets, compute_reproducibly


class Session:
    """One attempt of a run. Every process calls the methods in the order in which they stand."""

    state: RunState
    """The run's state after the newest step."""
    pretrained: PretrainedModel | None
    """The model of the Hub that the run trains; None for our own GPT with random weights."""
    finished: bool
    """Whether the run had taken all of its steps before this attempt, and evaluated the last."""
    _writer: SnapshotWriter
    """Writes the snapshots, once the weights are restored."""

    def __init__(self, config: Config, lock: RunLock) -> None:
        self.config = config
        run = config.run
        self.signals = Signals(run.grace_seconds, self._end_by_signal, launcher(), self._say_now)
        self._lock = lock
        self._uploads: Uploader | None = None
        self._is_restored = False
        self._best: BestSnapshot | None = None
        self._due = Due()
        self.finished = False
        self._held_out = float("nan")
        self._first = 1

    def begin(self, accelerator: Accelerator) -> None:
        """Derive accumulation, lock the run's directory, and set this process up.

        Raises ConfigError for a broken launch, a batch that cannot be divided, and a directory that
        another process trains in.
        """
        self.accelerator = accelerator
        check_configuration(accelerator, self.config)
        if other_model(self.config.model) is None:
            check_described(layout_for(gpt_config(self.config, vocab_size=1)))
        if self.config.model.frozen_dtype == NF4:
            refuse_nf4(accelerator)
        lock_run_dir(accelerator, self.config, self._lock)
        fit_threads()
        compute_reproducibly(is_compiled(accelerator))

    def choose_start(self) -> None:
        """Choose the snapshot to resume from, and find the model, the same on all processes.

        Raises SnapshotError for the snapshot of another run, as far as the configuration tells.
        """
        accelerator, config = self.accelerator, self.config
        self.start: Start = agree_on_start(accelerator, config, self._lock)
        self.pretrained = find_pretrained(accelerator, config, self.start)

    def check_text(self, corpus: Corpus) -> None:
        """Compare the text with the snapshot's; a streamed one resumes where that ends.

        Raises SnapshotError for the text of another run.
        """
        accelerator, config, pretrained = self.accelerator, self.config, self.pretrained
        self.corpus, start = corpus, self.start
        if start.state is not None:
            refuse_other_run(start.state, as_plain(config), data_facts(corpus))
        begin_stream(corpus, config, start.state)
        base = None if pretrained is None else pretrained.base
        machine = header.computed_on(accelerator)
        self.state = state_at(start, config, corpus, machine, base)
        self._generation = generation(pretrained, corpus)

    def packs(self, model: LanguageModel) -> bool:
        """Whether a row holds several documents. A run keeps what it began with."""
        state = self.state
        if state.rows is None:
            state.rows = SEVERAL if model.config.can_pack else ONE
        return state.rows == SEVERAL

    @property
    def next_step(self) -> int:
        """The first step of this attempt, counted from 1."""
        return self.state.step + 1

    @property
    def _is_last(self) -> bool:
        """Whether the run has taken all of its steps."""
        return self.state.step >= self.config.train.max_steps

    def open(self, model: LanguageModel) -> None:
        """Print the header, begin the uploads, and find out whether the run is finished."""
        accelerator, config, start, state = self.accelerator, self.config, self.start, self.state
        with model_errors():
            model.refuse_undescribed()
        choose_frozen_dtype(config, state, self.pretrained, model)
        check_model(accelerator, model)
        convert_to_fp8(model)
        key = None if self.pretrained is None else self.pretrained.base.key
        check_fits(accelerator, model, config.optim, key)
        console = Console(accelerator.is_main_process, config.train.max_steps, state.step)
        self.console = console
        console.speed_at_peak = speed_at_peak(model, config, accelerator)

        def begin_on_main() -> bool:
            """Begin the records and the uploads; whether the newest step is yet to evaluate."""
            begin_records(console, config, start, state)
            if config.snapshot.keep_best:
                self._best = BestSnapshot(config, state, start)
            header.print_header(console, accelerator, config, self.corpus, model, start, state)
            self._uploads = begin_uploads(console, config, start, state)
            return evaluation_is_pending(config, start, state)

        self._pending = decided_by_main(accelerator, begin_on_main)
        self.finished = self._is_last and not self._pending

    def restore(
        self, model: nn.Module, optimizer: AcceleratedOptimizer, held_out_loader: DataLoaderShard
    ) -> None:
        """Read weights and optimizer state, or draw new weights, and prepare for the first step.

        `model`, `optimizer` and `held_out_loader` come from `accelerator.prepare`. Where a kill
        came between the snapshot and its evaluation, the evaluation takes place here.
        """
        accelerator, config, start, state = self.accelerator, self.config, self.start, self.state
        self._model, bare_model, corpus = model, unwrapped(accelerator, model), self.corpus
        fill_weights(accelerator, self.pretrained, start, bare_model, optimizer, config.train.seed)
        keep_freed_memory()
        remove_downloads(config, self._lock)
        open_trackers(accelerator, self.console, config, state.run_id, state.step)
        tokens = config.train.global_batch_size * config.data.block_size
        self.report = Report(
            self.console,
            tokens,
            last_snapshot=start.folder if start.is_in(Path(config.run.dir)) else None,
            skipped=state.skipped_steps,
            max_skipped=config.train.max_skipped_steps,
            uploads=self._uploads,
            track=accelerator.log,
        )
        self._writer = SnapshotWriter(
            accelerator,
            config,
            model,
            optimizer,
            tokenizer=corpus.tokenizer,
            report=self.report,
            best=self._best,
            adapters=None if self.pretrained is None else self.pretrained.adapters,
            generation=self._generation,
            own_disks=self._lock.own_disks,
        )
        self._is_restored = True
        optimizer.optimizer.register_step_pre_hook(self.release_weights)
        self._timeouts = ProcessGroupTimeouts(accelerator, config.run)
        self._agreement = Agreement(accelerator, config, self.signals, seconds_since_launch())
        model.train()
        shape = split_of(accelerator, config.train).micro_batch, config.data.block_size
        build_gradient_buckets(accelerator, model, optimizer, shape)
        if self._pending:
            self.report_evaluation(held_out_loss(accelerator, model, held_out_loader))

    def steps(self) -> Iterator[int]:
        """Yield the steps that are left, counted from 1; the loop computes one update for each.

        Ends early when all processes have agreed to stop.
        """
        self._first = self.next_step
        self.signals.phase = Phase.TRAINING  # a signal finishes the step and writes a snapshot
        self.report.clock.enter(PASSES)  # the first speed is that of steps, too
        for step in range(self.next_step, self.config.train.max_steps + 1):
            yield step
            assert self.state.step == step, "finish_step was not called"
            if self._timeouts.are_long:
                self.accelerator.wait_for_everyone()
                self.report.clock.enter(PASSES)  # the speed is that of the steps
            if self._due.end:
                return
            self._timeouts.tighten()

    def finish_step(
        self,
        step: int,
        epoch: int,
        learning_rate: float,
        loss: Tensor,
        grad_norm: Tensor,
        /,
        **metrics: float | Tensor,
    ) -> Due:
        """Record an update and return what is due after it. Every process must call this.

        `loss` is this process's mean over the step, `grad_norm` the norm before clipping. Any other
        number of this process is a metric by its name: its mean over the processes goes to
        metrics.jsonl, the console and the trackers. Raises TrainingStopped when a loss or a norm is
        not finite, ConfigError when a metric has the name of one of these figures.
        """
        if self._writer.pending:  # fp16's loss scaler has skipped the update
            self.release_weights()
        self.state.step, self.state.epoch = step, epoch
        if isinstance(self.corpus.train, StreamedText):
            self.state.stream = self.corpus.train.finish(step)
        self.report.add(step, learning_rate, loss, grad_norm, metrics)
        if step == self._first:
            run_on_all(self.accelerator, partial(self._writer.check_update, step))
        self._due = self._agreement.after(step)
        if self._due.end and self.console.metrics is not None:
            # Before the snapshot, whose upload has it.
            event = "end" if self._is_last else "stop"
            self.console.metrics.add_event(event, step, self._agreement.reason)
        if any(self._due) or step % self.config.train.log_every == 0:
            self.report.write(self.accelerator)
        if any(self._due):
            self.report.clock.enter(EVALUATION)
            self._timeouts.relax()
        return self._due

    def save(self) -> None:
        """Begin the snapshot of the step; the next update waits for it. All processes call this."""
        self._writer.begin(self.state, self._due.end)

    def report_evaluation(self, loss: float) -> None:
        """Report the held-out loss of the step. Raises TrainingStopped when it is not finite."""
        self.report.held_out(self.state.step, loss, self.corpus.info)
        self.state.update_best_loss(loss)
        if self._best is not None:
            self._best.evaluated(self.state.step, loss)
        self._held_out = loss

    def report_sample(self, text: str) -> None:
        """Report a text that the model has generated; the next upload carries it."""
        self._writer.sample = text
        self.report.sample(self.state.step, text)

    def end(self) -> int:
        """Publish the last snapshot, wait for the upload, and return the exit code."""
        self.signals.phase = Phase.UPLOADING
        if self.finished:
            self.console.close()
            step = self.state.step
            self.console.say(
                f"The run is finished at step {step}. A larger train.max_steps extends it."
            )
            finish_uploads(self.console, self.config, self._uploads, self.signals)
            return EXIT_DONE
        self.report.clock.enter(END)
        if self._is_last:
            self._writer.publish(self.state.best_loss)
            header.print_end(
                self.console, self.config, self.corpus, self.state, self._held_out, self.report
            )
        else:
            header.print_stop(self.console, self.config, self.report, self._agreement.reason)
        with self.report.clock.within(UPLOAD):
            finish_uploads(self.console, self.config, self._uploads, self.signals)
        self._writer.prune(self.state.step)  # what an upload needed until now
        seconds = self.signals.seconds_left() - LAST_WORDS_SECONDS
        close_trackers(self.accelerator, self.console, seconds)
        self.console.say("\ntime      " + "\n          ".join(self.report.clock.table()))
        # When the first process leaves, the launcher ends the others. It may still upload.
        hub = self.config.hub
        self._timeouts.wait_for_everyone(hub.flush_seconds if hub.store_url is not None else 0)
        self._writer.close()
        self.accelerator.end_training()
        return EXIT_DONE if self._is_last else self._agreement.exit_code

    def finish_writing(self, seconds: float | None = None) -> None:
        """Wait, after an error, for a snapshot that began before it, and for the trackers.

        With a limit, wait at most so many seconds for the snapshot, and not for the trackers.
        """
        if self._is_restored:
            self._writer.end(seconds)
            seconds = END_SECONDS if seconds is None else 0
            close_trackers(self.accelerator, self.console, seconds)

    def flush_uploads(self, seconds: float) -> None:
        """Wait at most this long, after an error, for the uploads."""
        if self._uploads is not None:
            self._uploads.flush(seconds)

    def release_weights(self, *_: object) -> None:
        """Return when weights may change: a pending snapshot is written, or has copies of them.

        Every process must call this before train.py itself changes weights, as for an evaluation
        with averaged ones. An update calls it.
        """
        self.report.clock.enter(UPDATE)
        if self._writer.written is None:
            return
        if self._writer.pending:  # the other processes wait for the one that writes
            self._timeouts.relax()
        self._writer.finish()

    def _say_now(self, text: str) -> None:
        """Tell the user, from any thread."""
        if is_local_main_process():
            write_now(f"\n{text}\n", LAST_WORDS_SECONDS)

    def _end_by_signal(self, cause: int, why: str) -> None:
        """End the process from the thread that handles signals, whatever the others wait for."""
        code = CAUSES[cause].exit_code
        try:
            code = self._lock.note_exit(code)
            if why:
                self._say_now(f"stopped by {why}. {RESUME}")
            else:  # an error ended the run before, perhaps while it writes a snapshot
                self.finish_writing(WRITING_SECONDS)
        finally:
            os._exit(code)
