"""`snapshot.resume=never` starts over once, not again at a requeue, and moves nothing but runs."""

from __future__ import annotations

import contextlib
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import hubs
import runs
from config.compose import load_config
from config.schema import Config, ConfigError
from config.stored import as_plain, as_yaml
from small_snapshots import TOKENIZER, state_at, trained
from snapshot.disk.writing import Destination, begin_snapshot
from snapshot.errors import SnapshotError
from snapshot.start import Start, check_can_move_aside
from store.records import EVENTS
from training.reporting.events import Events
from training.reporting.metrics import as_line
from training.run import start
from training.run.run_dir import ATTEMPTS, RunLock, record_attempt

STEPS = 9
# `trained` makes the state of an AdamW.
WORDS = ["snapshot.resume=never", f"train.max_steps={STEPS}", "optim.name=adamw"]


def chosen(config: Config) -> tuple[Start, RunLock]:
    """What an attempt resumes from, and its lock of the run's directory."""
    lock = RunLock()
    lock.acquire(Path(config.run.dir))
    begun = start._choose(config, lock)
    return start.start_over(runs.ALONE, config, lock, begun), lock


def config_of(run_dir: Path, *words: str) -> Config:
    return load_config([*WORDS, f"run.dir={run_dir}", *words])


def ended(config: Config, step: int, code: int | None) -> Path:
    """The newest snapshot of a run that this configuration began, and that ended so."""
    run_dir = Path(config.run.dir)
    state = replace(state_at(step), config=as_plain(config))
    to = Destination(run_dir / "snapshots", piece_bytes=10**9)
    pending = begin_snapshot(to, state, *trained(step), TOKENIZER.save)
    if code is not None:
        (run_dir / "exit_code").write_text(f"{code}\n")
    return pending.write()


@pytest.mark.parametrize(
    ("code", "step", "restarts", "resumes"),
    [
        (75, 7, 0, True),  # the time limit
        (143, 7, 0, True),  # a preemption
        (1, 7, 0, True),  # a crash
        (None, 7, 0, True),  # a kill -9
        (75, STEPS, 0, True),  # in its last upload
        (0, STEPS, 0, False),  # done
        (None, STEPS, 0, False),
        (130, 7, 0, False),  # a person's Ctrl-C
        (2, 7, 0, True),  # a start that was refused, of a run that was killed
        (2, STEPS, 0, False),  # ... and of one that was done
        (None, STEPS, 1, True),  # the launcher's restart of a run that failed at its very end
    ],
)
def test_the_same_command_goes_on_with_the_run_that_it_began(
    tmp_path, monkeypatch, capsys, code, step, restarts, resumes
):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    config = config_of(tmp_path / "run")
    newest = ended(config, step, code)
    found, _ = chosen(config)
    assert found.folder == (newest if resumes else None)
    assert (tmp_path / "run.old-1").exists() != resumes
    assert any("To start over instead" in warning for warning in found.warnings) == resumes


@pytest.mark.parametrize("code", [2, None])  # refused since then; removed by cloud.attempts
@pytest.mark.parametrize("cause", ["Ctrl-C", "SIGTERM"])
def test_a_run_stopped_by_a_person_has_ended(tmp_path, code, cause):
    config = config_of(tmp_path / "run")
    ended(config, 7, code)
    events = Events(tmp_path / "run" / EVENTS, "0123456789")
    events.add("start", 0)
    events.add("stop", 7, cause)
    events.add("warning", 7, "something else")
    assert (chosen(config)[0].folder is None) == (cause == "Ctrl-C")


def without_snapshot(run_dir: Path, config: Config, steps: int) -> None:
    """A run that this configuration began, and that was killed before its first snapshot."""
    (run_dir / "snapshots").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(as_yaml(config))
    lines = (as_line({"event": "train", "step": n + 1, "loss": 1.0}) for n in range(steps))
    (run_dir / "metrics.jsonl").write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("code", "steps", "other", "moved"),
    [
        (None, 0, (), False),
        (1, 3, (), False),
        (2, 3, (), False),
        (75, 3, (), False),
        (130, 3, (), True),  # a person's Ctrl-C
        (1, 4, (), True),  # its snapshots are gone
        (1, 3, ("train.seed=0",), True),
    ],
)
def test_restarts_before_the_first_snapshot_begin_again_in_place(
    tmp_path, code, steps, other, moved
):
    run_dir = tmp_path / "run"
    without_snapshot(run_dir, config_of(run_dir, "snapshot.every=4"), steps)
    if code is not None:
        (run_dir / "exit_code").write_text(f"{code}\n")
    for _ in range(2):
        start, lock = chosen(config_of(run_dir, "snapshot.every=4", *other))
        lock.release()
        assert start.folder is None
        assert (tmp_path / "run.old-1").exists() == moved
    assert not (tmp_path / "run.old-2").exists()


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize(
    "other", ["train.seed=0", "snapshot.resume=auto", "model.dropout=0.1", "run.grace_seconds=9"]
)
def test_a_run_that_other_words_began_is_moved_aside(tmp_path, monkeypatch, other, restarts):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    run_dir = tmp_path / "run"
    ended(config_of(run_dir, other), 7, 75)
    assert chosen(config_of(run_dir))[0].folder is None
    assert (tmp_path / "run.old-1" / "snapshots" / "step-00000007").is_dir()


def test_a_run_of_which_nothing_is_whole_starts_over(tmp_path):
    run_dir = tmp_path / "run"
    (ended(config_of(run_dir), 7, 75) / "model.safetensors").unlink()
    assert chosen(config_of(run_dir))[0].folder is None
    assert (tmp_path / "run.old-1" / "snapshots" / "step-00000007").is_dir()


def test_what_a_new_run_notes_is_in_its_own_folder(tmp_path):
    run_dir = tmp_path / "run"
    ended(config_of(run_dir), 7, 0)
    _, lock = chosen(config_of(run_dir))
    record_attempt(run_dir, "new")
    lock.note_exit(75)
    assert (run_dir / ATTEMPTS).read_text() == "new\n"
    assert (run_dir / "exit_code").read_text() == "75\n"
    assert not (tmp_path / "run.old-1" / ATTEMPTS).exists()


def test_another_start_in_place_of_a_moved_run_keeps_it(tmp_path, monkeypatch):
    """A process that waits for the lock makes the directory anew, when its moment comes."""
    config = config_of(tmp_path / "run")
    ended(config, 7, 0)
    other, move = RunLock(), start.move_aside

    def move_slowly(*args) -> Start:
        moved = move(*args)
        other.acquire(tmp_path / "run")
        return moved

    monkeypatch.setattr(start, "move_aside", move_slowly)
    monkeypatch.setattr("training.run.run_dir.NOTICE_SECONDS", 0.1)
    monkeypatch.setattr("training.run.run_dir.WAIT_SECONDS", 0.2)
    with pytest.raises(ConfigError, match="another process trains in it"):
        chosen(config)


def test_of_a_run_behind_a_link_the_target_is_moved(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "disk" / "target")
    lock = RunLock()
    lock.acquire(link)  # a link that leads nowhere yet
    del lock
    ended(config_of(link), 7, 0)
    _, lock = chosen(config_of(link))
    assert (tmp_path / "disk" / "target.old-1" / "snapshots" / "step-00000007").is_dir()
    del lock
    RunLock().acquire(link)
    assert link.is_symlink()
    assert list((tmp_path / "disk" / "target" / "snapshots").iterdir()) == []


OTHER = SimpleNamespace(**vars(runs.ALONE) | {"is_main_process": False, "process_index": 1})
"""The first process of another machine."""


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_a_machine_with_a_disk_of_its_own_moves_its_run_aside_as_well(tmp_path, has_snapshot):
    config = config_of(tmp_path / "run", "snapshot.every=4")
    if has_snapshot:
        ended(config, 7, 0)
    else:  # under DDP only the main process writes them
        without_snapshot(tmp_path / "run", config, 7)
    old = sorted(path.name for path in (tmp_path / "run").iterdir())
    lock = RunLock()
    lock.acquire_on_other_machine(tmp_path / "run")
    start.start_over(OTHER, config, lock, Start(None, None, ""))
    assert set(old) - {"exit_code"} <= {path.name for path in (tmp_path / "run.old-1").iterdir()}
    assert lock.is_in(tmp_path / "run")
    assert list((tmp_path / "run" / "snapshots").iterdir()) == []


def test_a_machine_with_the_main_process_disk_moves_nothing(tmp_path):
    config = config_of(tmp_path / "run")
    ended(config, 7, 0)
    start.start_over(OTHER, config, RunLock(), Start(None, None, ""))
    assert not (tmp_path / "run.old-1").exists()


@pytest.mark.slow  # three starts of two launchers, 40 s
def test_two_machines_start_over_once(small, tmp_path):
    """Two launchers, a process and a disk each. The one without snapshots gets them at a resume."""
    disks = [tmp_path / "first" / "run", tmp_path / "second" / "run"]

    @contextlib.contextmanager
    def machines(*words: str):
        launch = runs.launch_command("ddp_multinode.yaml")
        port = next(word for word in launch if word.startswith("--main_process_port"))
        with contextlib.ExitStack() as stack:
            started = []
            for rank, disk in enumerate(disks):
                file = runs.rehearsal(
                    "ddp_cpu.yaml", tmp_path, 2, num_machines=2, machine_rank=rank
                )
                file = file.rename(tmp_path / f"rank-{rank}.yaml")
                options = ("--main_process_ip=127.0.0.1", "--same_network", port)
                command = runs.launch_command(
                    file, *small, *words, f"run.dir={disk}", options=options
                )
                into = tmp_path / f"said-{rank}"
                started.append(stack.enter_context(runs.started(command, into=into)))
            yield started

    never = ["snapshot.resume=never", "train.max_steps=1000", "train.eval_every=1000"]
    with machines() as both:
        assert [one.wait(timeout=runs.DEADLINE_SECONDS) for one in both] == [0, 0]
    with machines(*never) as both:
        runs.wait_until(lambda: (disks[0].parent / "run.old-1").exists(), both[0])
        runs.wait_until(lambda: runs.newest_step(disks[0]) > 20, both[0])
    for disk in disks:
        assert len(runs.losses(disk.parent / "run.old-1")) == 30
    with machines(*never) as both:
        resumed = "To start over instead"
        runs.wait_until(lambda: resumed in (tmp_path / "said-0").read_text(), both[0])
        reached = runs.newest_step(disks[0])
        runs.wait_until(lambda: runs.newest_step(disks[0]) > reached, both[0])
    assert [len(list(disk.parent.iterdir())) for disk in disks] == [2, 2]
    assert list((disks[1] / "snapshots").glob("step-*"))


def test_what_holds_more_than_a_run_is_not_moved(tmp_path, monkeypatch):
    work = tmp_path / "home" / "work"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "link").symlink_to(work)
    kept = [".", "..", "../..", str(tmp_path / "link"), str(tmp_path / "home"), str(runs.ROOT)]
    for run_dir in [*kept, str(runs.ROOT.parent), "/"]:
        with pytest.raises(SnapshotError, match=r"would move run\.dir=.* aside, and .* with it"):
            check_can_move_aside(Path(run_dir))
    for run_dir in ["run", "out/run", "../other", str(tmp_path / "home2")]:
        check_can_move_aside(Path(run_dir))


def test_a_working_folder_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SnapshotError, match="and the working folder with it"):
        start.lock_run_dir(runs.ALONE, config_of(Path()), RunLock())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "word",
    [
        "data.source=FOLDER/text.txt",
        "data.source=FOLDER/*.txt",
        "data.tokenizer=FOLDER/words",
        "model.pretrained=FOLDER",
        "model.pretrained=FOLDER/base",
        "model.architecture=FOLDER/base",
        "data.mix=[{source: FOLDER/text.txt}]",
    ],
)
def test_what_the_command_reads_is_not_moved_with_the_run(tmp_path, word):
    """The command could not be started again, or would fail once its model is moved."""
    word = word.replace("FOLDER", str(tmp_path / "run"))
    key = word.partition("=")[0]
    others = [] if key in ("data.source", "data.tokenizer") else ["data.tokenizer=gpt2"]
    config = config_of(tmp_path / "run", word, *others)
    with pytest.raises(SnapshotError, match=rf"aside, and {key}.* with it"):
        start.lock_run_dir(runs.ALONE, config, RunLock())
    config.run.dir = str(tmp_path / "other")
    check_can_move_aside(tmp_path / "other", start.read_by(config))


@pytest.mark.thorough
def test_a_requeued_run_resumes_from_its_repo_despite_never(small, tmp_path, hub):
    run_dir = tmp_path / "run"
    words = [*small, *hubs.words(run_dir), "snapshot.resume=never", "train.max_steps=100"]
    with runs.started(runs.command(*words), **hub.environment()) as process:
        runs.wait_until(lambda: runs.newest_step(run_dir) >= 5, process)
        process.send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    reached = hubs.step_of(hub)
    assert reached >= 5
    shutil.rmtree(run_dir)  # the next attempt is on another machine
    again = runs.run(runs.command(*words), **hub.environment())
    assert again.returncode == 0, again.stderr
    assert f"step-{reached:08d}, fetched from" in again.stdout
    assert "To start over instead" in again.stdout
    assert hubs.step_of(hub) == 100
