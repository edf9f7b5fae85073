"""A run's records: its metrics, which step is the best, and what its store gets of all that.

No error leaves `store.uploader`, so a run continues without its store.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from common.retries import with_retries
from config.schema import Config, ConfigError
from config.stored import CONFIG_FILE, as_plain, as_yaml
from snapshot.config_values import changed_values
from snapshot.disk.checking import check_model
from snapshot.disk.folder import snapshot_folders, snapshots_in, step_of, write_whole
from snapshot.disk.state import RunState, read_state, versions
from snapshot.errors import SnapshotError
from snapshot.start import RunStore, Start
from store.attempt import Best, Card, UploadTarget
from store.card import card_text
from store.errors import StoreError
from store.fetch import fetch_metrics
from store.kinds import open_store
from store.latest import METRICS
from store.uploader import Uploader
from training.reporting.console import Console
from training.reporting.curves import CURVES
from training.reporting.metrics import (
    MetricsFile,
    add_fetched,
    held_out_losses,
    metrics_up_to,
    newest_step,
)
from training.run.run_dir import not_writable
from training.run.stopping import LAST_WORDS_SECONDS, Signals


def begin_records(console: Console, config: Config, start: Start, state: RunState) -> None:
    """Write config.yaml, and continue metrics.jsonl, also with what other machines recorded.

    Only the main process calls this. Raises ConfigError where the disk refuses it.
    """
    run_dir = Path(config.run.dir)
    # A run that begins from another run's snapshot has no lines of its own yet.
    step = state.step if start.is_in(run_dir) else 0
    problem = fetch_missing(config, start, state)
    try:
        # This comes first, because it makes the folder a run's.
        write_whole(run_dir / CONFIG_FILE, as_yaml(config).encode())
        metrics = MetricsFile(run_dir / METRICS, step, state.attempt_id)
    except OSError as error:
        raise not_writable(run_dir, error) from error
    console.metrics = metrics
    if problem:
        console.warn(problem)
    metrics.add_event("start", state.step, "resumed" if start.folder else "from scratch")
    metrics.add_event("machine", state.step, state.computed_on or "")
    if start.state is not None:
        for change in changed_values(start.state.config, as_plain(config)):
            metrics.add_event("changed", state.step, change)


def fetch_missing(config: Config, start: Start, state: RunState) -> str:
    """Fetch the metrics of steps that another machine took, where this disk lacks them.

    Returns why that failed, or an empty text.
    """
    run_dir, contents = Path(config.run.dir), start.contents
    if contents is None or contents.latest is None or contents.latest.run_id != state.run_id:
        return ""
    try:
        if newest_step(run_dir / METRICS) >= state.step:
            return ""
        with TemporaryDirectory(prefix=".tmp-", dir=snapshots_in(run_dir)) as folder:
            fetched = with_retries(lambda: fetch_metrics(contents, Path(folder)))
            if fetched is not None:
                add_fetched(run_dir / METRICS, fetched, state.step)
    except (SnapshotError, StoreError, ConfigError, OSError) as error:
        return (
            f"the metrics of earlier steps could not be fetched from {contents.name}: "
            f"{str(error).rstrip('.')}. The curves of this run begin at step {state.step + 1}."
        )
    return ""


class BestSnapshot:
    """Which snapshot has the lowest held-out loss, among those on this disk and in the store.

    A step is evaluated while its snapshot is written, so the two meet when the best is asked for.
    """

    def __init__(self, config: Config, state: RunState, start: Start) -> None:
        """Begin an attempt at `state`. Only the main process of a run that keeps the best does."""
        run_dir, latest = Path(config.run.dir), start.known_latest
        self._root = snapshots_in(run_dir)
        self._losses = held_out_losses(run_dir / METRICS)  # by step
        self._in_store: list[Best] = []
        if latest is not None and latest.run_id == state.run_id and latest.best_loss is not None:
            self._in_store = [Best(latest.best_step, latest.best_loss)]

    @property
    def newest(self) -> Best | None:
        """The best snapshot so far, if there is one. Any thread may ask."""
        losses = dict(self._losses)  # the main thread may add one meanwhile
        steps = map(step_of, snapshot_folders(self._root))
        here = [Best(step, losses[step]) for step in steps if step in losses]
        return min(here + self._in_store, key=lambda best: best.loss, default=None)

    def evaluated(self, step: int, loss: float) -> None:
        """Note the held-out loss of a step, whose snapshot may still be written."""
        self._losses[step] = loss


def evaluation_is_pending(config: Config, start: Start, state: RunState) -> bool:
    """Whether the step that this attempt resumes from has not been evaluated; main process only.

    Where it has been, its loss updates `state.best_loss`, because the snapshot is older than its
    evaluation.
    """
    run_dir, step = Path(config.run.dir), state.step
    if not start.is_in(run_dir):
        return False  # a new run, perhaps from another run's snapshot
    loss = held_out_losses(run_dir / METRICS, since=step).get(step)
    if loss is not None:
        state.update_best_loss(loss)
        return False
    return step % config.train.eval_every == 0 or step >= config.train.max_steps


def store_of(config: Config) -> RunStore | None:
    """The store that `hub.url` or `hub.repo_id` names; None without."""
    hub = config.hub
    if hub.store_url is None:
        return None
    return RunStore(open_store(hub.store_url, hub.timeout_seconds), hub.private, hub.takeover)


def begin_uploads(
    console: Console, config: Config, start: Start, state: RunState
) -> Uploader | None:
    """Begin the uploads of this attempt; None without a repo, and where HF_HUB_OFFLINE is set.

    Only the main process calls this. Snapshots that an earlier attempt did not upload go first: the
    newest one, and milestones.
    """
    store, hub, run_dir = store_of(config), config.hub, Path(config.run.dir)
    if store is None or store.store.is_offline:
        return None
    seen = start.known_latest

    def records(step: int) -> dict[str, bytes]:
        content = metrics_up_to(run_dir / METRICS, step)
        return {METRICS: content} if content else {}

    target = UploadTarget(
        store.store,
        state.run_id,
        state.attempt_id,
        keep=hub.keep,
        private=hub.private,
        takeover=hub.takeover,
        min_interval=hub.min_interval_seconds,
        milestone_every=hub.milestone_every,
        known_latest=seen,
        records=records,
        was_read=start.contents is not None,
    )
    uploads = Uploader(target)
    uploaded = seen.step if seen is not None and seen.run_id == state.run_id else 0
    if not start.is_in(run_dir) or uploaded >= state.step:
        return uploads
    for folder in reversed(snapshot_folders(snapshots_in(run_dir))):
        is_due = target.is_milestone(step_of(folder)) and step_of(folder) < state.step
        if folder == start.folder or (is_due and uploaded < step_of(folder)):
            hand_over(console, uploads, config, folder)
    return uploads


def hand_over(
    console: Console,
    uploads: Uploader | None,
    config: Config,
    snapshot: Path | None,
    sample: str | None = None,
    best_loss: float | None = None,
    best: BestSnapshot | None = None,
) -> None:
    """Offer a finished snapshot for upload, with a model card and the present curves.

    `best_loss` goes into the card where it is newer than the snapshot's.
    """
    if uploads is None or snapshot is None or uploads.status().off:
        return
    picture = None
    with suppress(OSError):  # not drawn yet, or not readable: a snapshot matters more
        picture = (Path(config.run.dir) / CURVES).read_bytes()
    try:
        state, newest_best = read_state(snapshot), None if best is None else best.newest
        if best_loss is not None:
            state.update_best_loss(best_loss)
        text = card_text(
            str(config.hub.repo_id or config.hub.store_url),
            state,
            check_model(snapshot),
            versions(),
            sample=sample,
            has_curves=picture is not None,
            best=newest_best,
            speed=console.speed_in_words(),
        )
    except Exception as error:  # it was removed or damaged meanwhile; a run matters more
        console.warn(f"a snapshot is not uploaded: {snapshot}: {error}.")
        return
    uploads.offer(snapshot, Card(text, picture), newest_best)


def finish_uploads(
    console: Console, config: Config, uploads: Uploader | None, signals: Signals
) -> None:
    """Wait a limited time for the last upload, and print its outcome."""
    store = store_of(config)
    if uploads is None or store is None:
        return
    name = store.store.name
    seconds = min(config.hub.flush_seconds, signals.seconds_left() - LAST_WORDS_SECONDS)
    if uploads.pending_folders():
        console.say(f"hub       uploading to {name}; at most {seconds:.0f} s, Ctrl-C skips it")
    done = uploads.flush(seconds, lambda: signals.seconds_left() > LAST_WORDS_SECONDS)
    for message in uploads.messages():
        console.warn(message)
    status = uploads.status()
    if done and not status.off and status.failure_text is None and status.step is not None:
        console.say(f"hub       {name} has step {status.step}")
        return
    reached = "has nothing yet" if status.was_read else "was never reached"
    if status.step is not None:
        reached = f"has step {status.step}, not the newest"
    reason = f": {status.failure_text.rstrip('.')}" if status.failure_text else ""
    remedy = "The same command uploads it at its next start."
    if status.off:
        reached, reason = "lacks the end of this run", ": uploads have stopped, see above"
        remedy = f"The local snapshots are in {snapshots_in(Path(config.run.dir))}."
    console.warn(f"the newest snapshot is not uploaded: {name} {reached}{reason}. {remedy}")
