"""A run and its store on the Hub: begin the uploads, hand over each snapshot, wait at the end.

No error leaves `store.uploader`, so a run continues without the Hub.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from config.schema import Config
from snapshot.disk.checking import check_model
from snapshot.disk.folder import snapshot_folders, snapshots_in, step_of
from snapshot.disk.state import RunState, read_state, versions
from snapshot.start import RunStore, Start
from store.attempt import Best, Card, Policy, UploadTarget
from store.card import card_text
from store.kinds import open_store
from store.uploader import Uploader
from training.reporting.console import Console
from training.reporting.curves import CURVES
from training.run.records import metrics_for_upload
from training.run.stopping import LAST_WORDS_SECONDS, Signals


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
    policy = Policy(
        hub.keep, hub.min_interval_seconds, hub.private, hub.takeover, hub.milestone_every
    )
    uploads = Uploader(
        UploadTarget(
            store.store,
            policy,
            state.run_id,
            state.attempt_id,
            start.known_latest,
            partial(metrics_for_upload, config),
            start.contents is not None,
        )
    )
    seen = start.known_latest
    uploaded = seen.step if seen is not None and seen.run_id == state.run_id else 0
    if not start.is_in(run_dir) or uploaded >= state.step:
        return uploads
    for folder in reversed(snapshot_folders(snapshots_in(run_dir))):
        is_due = policy.is_milestone(step_of(folder)) and step_of(folder) < state.step
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
    best: Callable[[], Best | None] = lambda: None,
) -> None:
    """Offer a finished snapshot for upload, with a model card and the present curves.

    `best_loss` goes into the card where it is newer than the snapshot's. `best` returns the
    snapshot with the lowest held-out loss, if that is kept.
    """
    if uploads is None or snapshot is None or uploads.status().off:
        return
    picture = None
    with suppress(OSError):  # not drawn yet, or not readable: a snapshot matters more
        picture = (Path(config.run.dir) / CURVES).read_bytes()
    try:
        state, newest_best = read_state(snapshot), best()
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
    elif status.off:
        console.warn(
            f"the uploads are not complete: {name} lacks the end of this run: uploads have "
            f"stopped, see above. The local snapshots are in {snapshots_in(Path(config.run.dir))}."
        )
    else:
        reached = "has nothing yet" if status.was_read else "was never reached"
        if status.step is not None:
            reached = f"has step {status.step}, not the newest"
        reason = f": {status.failure_text.rstrip('.')}" if status.failure_text else ""
        console.warn(
            f"the newest snapshot is not uploaded: {name} {reached}{reason}. The same command "
            "uploads it at its next start."
        )
