"""Several attempts of a run on one repo: one owns it, and a living one's newest step gets there.

The clock is the test's. Snapshots are tiny, the client and the server are real.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

import hubs
from config.compose import load_config
from loopback_hub import LoopbackHub
from snapshot.disk.files import folder_name, write_json
from snapshot.disk.writing import atomic_snapshot
from store.errors import HubConflict
from store.fence import Fenced, Held
from store.fetch import read_repo
from store.ownership import DONE
from store.repo import Hub
from store.repo_attempt import RepoAttempt
from store.store import Policy, Upload, UploadTarget
from store.uploader import Uploader
from training.reporting.console import Console
from training.run.uploading import finish_uploads

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"  # huggingface_hub 2.4 calls httpx2 so
)
MINUTE = 60.0
EVERY = 10 * MINUTE
"""Between two snapshots of a living attempt."""


def tiny(root: Path, step: int) -> Path:
    """A folder that an upload takes for a snapshot."""
    with atomic_snapshot(root, folder_name(step)) as folder:
        write_json(folder / "config.json", {"step": step})
    return root / folder_name(step)


@dataclass
class Trainer:
    """One attempt: it takes snapshots, uploads the newest, and dies."""

    name: str
    attempt: RepoAttempt
    hub: hubs.Interrupted
    root: Path
    step: int
    started: float
    living: bool = True
    pending: Upload | None = None
    said: list[str] = field(default_factory=list)

    def snapshot(self, is_last: bool = False) -> None:
        self.step += 10
        self.pending = Upload(
            tiny(self.root, self.step), hubs.Card("# card\n"), None, DONE if is_last else ""
        )
        self.upload()

    def upload(self) -> None:
        """One try of the uploader."""
        if self.pending is not None:
            try:
                self.attempt.upload(self.pending)
                self.pending = None
            except (Held, HubConflict) as error:
                self.said.append(str(error))


class Scene:
    """Attempts of one run, whose clocks differ by hours, and a repo."""

    def __init__(self, hub: LoopbackHub, folder: Path) -> None:
        hub.create(hubs.REPO)
        self.hub, self.folder, self.now = hub, folder, 0.0
        self.trainers: list[Trainer] = []
        self.told: list[str] = []

    def start(self) -> Trainer:
        """An attempt on a machine with an empty disk, which resumes from the repo."""
        name = "ABCDEFGHIJ"[len(self.trainers)]
        client = hubs.Interrupted(hubs.REPO, lambda: None)
        known = read_repo(client).latest
        policy = Policy(3, 0.0, None, private=True, takeover=False)
        target = UploadTarget(client, policy, "run", name, known)
        wrong = len(self.trainers) * 60 * MINUTE
        attempt = RepoAttempt(client, target, self.told.append, lambda: self.now - wrong)
        step = 0 if known is None else known.step
        trainer = Trainer(name, attempt, client, self.folder / name, step, self.now)
        self.trainers.append(trainer)
        return trainer

    def living(self) -> list[Trainer]:
        return [one for one in self.trainers if one.living]

    def wait(self, minutes: float, train: bool = False) -> None:
        """Time passes, and what is due in each living attempt is done."""
        until = self.now + minutes * MINUTE
        while self.now < until:
            self.now += MINUTE
            for one in self.living():
                if train and (self.now - one.started) % EVERY == 0:
                    one.snapshot()
                elif one.attempt.seconds_until_beat() <= 0:
                    one.attempt.beat()
                elif self.now % (2 * MINUTE) == 0:
                    one.upload()

    def owners(self) -> list[tuple[str, int]]:
        """By commit that changed the owner: the attempt, and its step."""
        commits = [(one["attempt_id"], one["step"]) for one in hubs.all_latest(self.hub)]
        return [next(group) for _, group in itertools.groupby(commits, key=lambda one: one[0])]

    @property
    def owner(self) -> str:
        return hubs.latest(self.hub).get("attempt_id", "-")


def assert_newest_is_there(scene: Scene) -> None:
    """What holds in the end, whatever has happened."""
    owner = next(one for one in scene.trainers if one.name == scene.owner)
    if scene.living():
        assert owner.living
        assert hubs.step_of(scene.hub) == owner.step
        assert owner.pending is None


def before(scene: Scene, one: Trainer, other: Callable[[], Trainer]) -> Trainer:
    """The dying attempt uploads when the other has started, and before it uploads."""
    second = other()
    one.snapshot(is_last=True)
    one.living = False
    second.snapshot()
    return second


def without_a_word(scene: Scene, one: Trainer, other: Callable[[], Trainer]) -> Trainer:
    """The same, killed before it could say that it ends."""
    second = other()
    one.snapshot()
    one.living = False
    second.snapshot()
    assert "This one takes over when that one has been silent for" in second.said[-1]
    return second


def during(scene: Scene, one: Trainer, other: Callable[[], Trainer]) -> Trainer:
    """The dying attempt's commit comes between the contents and the commit of the other."""
    second = other()
    second.hub.then = lambda: one.snapshot(is_last=True)
    second.snapshot()
    one.living = False
    return second


def after(scene: Scene, one: Trainer, other: Callable[[], Trainer]) -> Trainer:
    """The dying attempt uploads when the other has uploaded."""
    second = other()
    second.snapshot()
    one.snapshot(is_last=True)
    one.living = False
    assert scene.owner == second.name
    return second


def overwriting(scene: Scene, one: Trainer, other: Callable[[], Trainer]) -> Trainer:
    """The same at a server that ignores the parent of a commit."""
    scene.hub.fault("commit", "ignore-parent", times=None)
    second = other()
    one.hub.then = lambda: None
    confirm = one.attempt._confirm
    one.attempt._confirm = lambda *_: second.snapshot()  # in the moment after it has looked
    one.snapshot(is_last=True)
    one.attempt._confirm = confirm
    one.living = False
    assert scene.owner == one.name
    return second


@pytest.mark.parametrize("order", [before, without_a_word, during, after, overwriting])
def test_the_last_upload_of_a_dying_attempt_fences_no_other(near_hub, tmp_path, order):
    scene = Scene(near_hub, tmp_path)
    first = scene.start()
    scene.wait(20, train=True)
    assert hubs.step_of(near_hub) == first.step == 20
    second = order(scene, first, scene.start)
    scene.wait(60, train=True)
    assert_newest_is_there(scene)
    assert scene.owner == second.name
    takeovers = [one for one in scene.told if "this one continues there" in one]
    assert len(takeovers) == (order is not after)
    hubs_commits = [one["attempt_id"] for one in hubs.all_latest(near_hub)]
    assert hubs_commits == sorted(hubs_commits) or order is overwriting


@pytest.mark.parametrize("keeps", ["A", "B"])
def test_of_two_living_attempts_one_keeps_the_repo(near_hub, tmp_path, keeps):
    """The first that uploads after the later start; it is taken over from when it dies."""
    scene = Scene(near_hub, tmp_path)
    first = scene.start()
    scene.wait(20, train=True)
    second = scene.start()
    (first if keeps == "A" else second).snapshot()
    scene.wait(60, train=True)
    assert [name for name, _ in scene.owners()] == (["A"] if keeps == "A" else ["A", "B"])
    assert_newest_is_there(scene)
    owner, other = (first, second) if keeps == "A" else (second, first)
    owner.living = False
    scene.wait(60, train=True)
    assert scene.owner == other.name
    assert_newest_is_there(scene)


def test_when_both_are_dead_the_next_start_uploads_at_once(near_hub, tmp_path):
    scene = Scene(near_hub, tmp_path)
    first = scene.start()
    scene.wait(20, train=True)
    second = scene.start()
    first.snapshot()
    first.living = second.living = False
    third = scene.start()
    third.snapshot()
    assert (scene.owner, hubs.step_of(near_hub)) == ("C", 40)
    assert scene.told == []


def test_an_owner_with_rare_snapshots_shows_that_it_lives(near_hub, tmp_path):
    """The other would take over after an hour, and does when the owner has died."""
    scene = Scene(near_hub, tmp_path)
    rare = scene.start()
    scene.wait(3 * 60)
    rare.snapshot()
    other = scene.start()
    rare.snapshot()
    commits = near_hub.count("commit")
    other.snapshot()
    scene.wait(3 * 60)
    assert (scene.owner, near_hub.count("commit") - commits) == ("A", 4)
    rare.living = False
    scene.wait(2 * 60)
    assert scene.owner == "B"
    beats = [one["heartbeat"] for one in hubs.all_latest(near_hub) if one["attempt_id"] == "A"]
    assert beats == list(range(1, 7))


def test_the_uploads_of_one_attempt_alone_are_its_only_commits(near_hub, tmp_path):
    scene = Scene(near_hub, tmp_path)
    scene.start()
    scene.wait(120, train=True)
    assert len(hubs.all_latest(near_hub)) == 12


def test_an_owner_shows_that_it_lives_between_two_uploads(near_hub, tmp_path, monkeypatch):
    """With hub.min_interval_seconds=7200, in the real thread; a second stands for an hour."""
    for name in ("SHORTEST", "USUAL"):
        monkeypatch.setattr(f"store.fence.{name}_SILENCE_SECONDS", 1)
    near_hub.create(hubs.REPO)
    policy = Policy(3, 7200.0, None, private=True, takeover=False)
    uploads = Uploader(UploadTarget(Hub(hubs.REPO, 5.0), policy, "run", "A"))
    for step in (10, 20):
        uploads.offer(tiny(tmp_path, step), hubs.Card("# card\n"))
        near_hub.wait_for(lambda: hubs.step_of(near_hub) == 10)
    near_hub.wait_for(lambda: hubs.latest(near_hub)["heartbeat"] >= 3)
    assert hubs.step_of(near_hub) == 10
    uploads.offer(tiny(tmp_path, 30), hubs.Card("# card\n"), is_last=True)
    assert uploads.flush(30)
    assert (hubs.step_of(near_hub), hubs.latest(near_hub)["silence_seconds"]) == (30, 0)


@pytest.mark.parametrize("step", [20, 40])
@pytest.mark.parametrize("ends", [False, True], ids=["lives", "has ended"])
def test_the_end_of_a_run_says_what_the_repo_has_instead(near_hub, tmp_path, capsys, step, ends):
    """It waits for no owner that lives, and the next start loses nothing of either."""
    near_hub.create(hubs.REPO)
    policy = Policy(3, 0.0, None, private=True, takeover=False)
    owner, other = (
        Uploader(UploadTarget(Hub(hubs.REPO, 5.0), policy, "run", name)) for name in "AB"
    )
    owner.offer(tiny(tmp_path / "A", step), hubs.Card("# card\n"), is_last=ends)
    assert owner.flush(30)
    other.offer(mine := tiny(tmp_path / "B" / "snapshots", 30), hubs.Card("# card\n"), None, True)
    config = load_config([f"run.dir={tmp_path / 'B'}", f"hub.repo_id={hubs.REPO}"])
    begun = time.monotonic()
    finish_uploads(Console(True, 30, 0), config, other, SimpleNamespace(seconds_left=lambda: 1e9))
    assert time.monotonic() - begun < config.hub.flush_seconds / 2
    said = capsys.readouterr().out.splitlines()[-1]
    if ends and step < 30:
        assert "me/run has step 30; uploads sent" in said
    elif step < 30:
        assert "me/run has step 20, not the newest" in said
        assert said.endswith("The same command uploads it at its next start.")
    else:
        assert "me/run has step 40 of another attempt, not step 30 of this" in said
        assert said.endswith("The same command continues from the later one.")
    assert mine.is_dir()
    assert hubs.step_of(near_hub) == max(step, 30 if ends else 0)


def test_another_run_is_never_taken_over_by_waiting(near_hub, tmp_path):
    scene = Scene(near_hub, tmp_path)
    mine = scene.start()
    policy = Policy(3, 0.0, None, private=True, takeover=False)
    target = UploadTarget(mine.hub, policy, "other", "X")
    other = RepoAttempt(mine.hub, target, scene.told.append, lambda: scene.now)
    mine.snapshot(is_last=True)
    upload = Upload(tiny(tmp_path / "other", 20), hubs.Card("# card\n"))
    for _ in range(2):
        with pytest.raises(Fenced, match="another run has uploaded step 10"):
            other.upload(upload)
        scene.now += 48 * 60 * MINUTE


def happen(scene: Scene, chosen: random.Random) -> str:
    """One random event; its name."""
    living = scene.living()
    if not living or (len(scene.trainers) < 5 and chosen.random() < 0.25):
        return f"{scene.start().name} starts"
    one = chosen.choice(living)
    kind = chosen.choice(["snapshot", "snapshot", "wait", "dies", "ends", "late", "during"])
    if kind == "wait":
        scene.wait(minutes := chosen.choice([3, 12, 40]))
        return f"{minutes} min"
    if kind == "during" and len(living) > 1:
        other = chosen.choice([another for another in living if another is not one])
        one.hub.then = lambda: other.snapshot()
        one.snapshot()
        return f"{one.name} uploads, {other.name} in between"
    if kind in ("dies", "ends", "late") and len(scene.trainers) > 4 and len(living) == 1:
        kind = "snapshot"  # somebody has to live on
    if kind != "dies":
        one.snapshot(is_last=kind == "ends")
    one.living = kind not in ("dies", "ends", "late")
    return {
        "dies": f"{one.name} dies",
        "ends": f"{one.name} uploads its last and ends",
        "late": f"{one.name} uploads and dies",
    }.get(kind, f"{one.name} uploads")


def random_order(hub: LoopbackHub, folder: Path, seed: int) -> str:
    """A random order of events, then two hours of calm; its line of the table."""
    scene, chosen = Scene(hub, folder), random.Random(seed)
    events = [f"{scene.start().name} starts"]
    events += [happen(scene, chosen) for _ in range(8)]
    if not scene.living():
        events.append(f"{scene.start().name} starts")
    unrest = len(hubs.all_latest(hub))
    scene.wait(130, train=True)
    assert_newest_is_there(scene)
    calm = [one["attempt_id"] for one in hubs.all_latest(hub)[unrest:]]
    assert len([name for name, _ in itertools.groupby(calm)]) <= 2
    # Of two that live none gets the repo back that it has lost to the other.
    names = [name for name, _ in scene.owners()]
    again = {name for name in names if names.count(name) > 1}
    for name in again:
        between = names[names.index(name) + 1 : len(names) - names[::-1].index(name) - 1]
        assert not any(one.living for one in scene.trainers if one.name in between)
    living = ", ".join(f"{one.name} at {one.step}" for one in scene.living())
    return f"{'; '.join(events)} | {living} | {scene.owner}, step {hubs.step_of(hub)}"


@pytest.mark.parametrize(
    "seeds",
    [
        range(2),
        pytest.param(range(2, 8), marks=pytest.mark.thorough),
        pytest.param(range(8, 20), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_in_any_order_the_newest_step_of_a_living_attempt_wins(tmp_path, monkeypatch, seeds):
    print("\norder of events | alive in the end | in the repo")
    for seed in seeds:
        with LoopbackHub(tmp_path / f"hub-{seed}", new_port=True, use_xet=False) as hub:
            hubs.lead_here(hub, monkeypatch)
            print(random_order(hub, tmp_path / f"run-{seed}", seed))
