"""The job scripts in slurm/, on a real Slurm: what they start, and what brings a job back.

What the scripts do is tried with a launcher that only says how it was started and ends as told.
That the run behind them goes on bit for bit is tried with training, one process on each of two
machines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import runs
from runs import ROOT
from slurm_cluster import GPUS, MACHINES, Cluster, cluster

SCRIPTS = ("slurm/ddp.sbatch", "slurm/fsdp.sbatch")
STEPS = 300
STAND_IN = (
    f"#!{sys.executable}\n"
    + """\
# In accelerate's place: writes down how it was started, and ends as STAND_IN says.
import json, os, pathlib, signal, sys

signals = {signal.SIGUSR1, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
words = sys.argv[1:]
attempt, machine = int(os.environ.get("SLURM_RESTART_COUNT", "0")), os.environ["SLURM_NODEID"]
run_dir = pathlib.Path(words[-1].removeprefix("run.dir="))
settings = {name: os.environ[name] for name in os.environ if name.startswith(("PET_", "TORCH_"))}
started = run_dir / f"started-{attempt}-{machine}.json"
started.with_suffix(".new").write_text(json.dumps({"words": words, "settings": settings}))
started.with_suffix(".new").rename(started)

task = os.environ.get("SLURM_ARRAY_TASK_ID")
end = os.environ["STAND_IN"].split()[attempt + 2 * (task == "2")]
if end.startswith("at-"):
    told = signal.sigwait(signals).name
    assert end.startswith(f"at-{told}"), f"{told}, but {end} is awaited"
    end = end.rpartition("-")[2]
if end.startswith("crash"):
    sys.exit(9)
if machine == "0":
    if end.endswith("+"):
        (run_dir / f"snapshots/step-{attempt + 1:08d}").mkdir(parents=True)
    (run_dir / "exit_code").write_text(end.rstrip("+"))
sys.exit(end != "0")
"""
)


class Rehearsal:
    """A folder that the scripts take for the repository, with a stand-in for accelerate."""

    def __init__(self, slurm: Cluster, folder: Path) -> None:
        self.slurm, self.folder, self.run_dir = slurm, folder, folder / "out/ddp"
        for name in ("slurm", "accelerate_configs"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "train.py").touch()
        launcher = folder / "bin" / "accelerate-launch"
        launcher.parent.mkdir()
        launcher.write_text(STAND_IN)
        launcher.chmod(0o755)

    def submit(
        self, *ends: str, script: str = SCRIPTS[0], options: tuple[str, ...] = (), **changes: str
    ) -> int:
        """A job whose attempts end so, one after the other.

        An end is the exit code of the run, with a + after a new snapshot; or `crash`; or either
        behind `at-SIGUSR1-`, `at-SIGTERM-`: when the signal comes.
        """
        changes["PATH"] = f"{self.folder / 'bin'}:{self.slurm.environment['PATH']}"
        changes["STAND_IN"] = " ".join(ends)
        text = "data.source=my text.txt"
        return self.slurm.submit(script, text, options=options, folder=self.folder, **changes)

    def submit_and_wait(self, *ends: str) -> int:
        """A job of which both machines have started the first attempt."""
        job = self.submit(*ends)
        self.wait_for(attempt=0)
        return job

    def wait_for(self, attempt: int) -> None:
        """Wait until both machines have started an attempt."""
        notes = [self.run_dir / f"started-{attempt}-{machine}.json" for machine in (0, 1)]
        self.slurm.wait_until(lambda: all(note.exists() for note in notes))

    def started(self, attempt: int, machine: int, run_dir: str = "out/ddp") -> dict:
        """How a machine's launcher was started."""
        note = self.folder / run_dir / f"started-{attempt}-{machine}.json"
        return json.loads(note.read_text())

    def assert_ended(self, job: int | str, state: str = "COMPLETED", code: int = 0) -> None:
        assert self.slurm.end_of(job) == (state, code), self.slurm.output(job)

    def assert_completed_after(self, restarts: int, job: int | str) -> None:
        self.assert_ended(job)
        assert self.slurm.about(job)["Restarts"] == str(restarts)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def rehearsal(slurm, tmp_path) -> Rehearsal:
    return Rehearsal(slurm, tmp_path)


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_machine_starts_one_launcher_for_its_gpus(script, rehearsal):
    name = Path(script).stem
    rehearsal.assert_ended(rehearsal.submit("0", script=script))
    for machine in (0, 1):
        started = rehearsal.started(0, machine, f"out/{name}")
        options, train = started["words"], started["words"].index("train.py")
        given = dict(zip(options[:train:2], options[1:train:2], strict=True))
        assert int(given.pop("--max_restarts")) > 0
        assert given == {
            "--config_file": f"accelerate_configs/{name}_multinode.yaml",
            "--machine_rank": str(machine),
            "--num_machines": "2",
            "--num_processes": str(2 * GPUS),
            "--main_process_ip": "127.0.0.1",
            "--main_process_port": given["--main_process_port"],
            "--rdzv_conf": "timeout=300",
        }
        run_dir = f"run.dir=out/{name}"
        words = ["run.grace_seconds=100", "data.source=my text.txt", run_dir]
        assert options[train + 1 :] == words
        assert "SIGUSR1" in started["settings"]["PET_SIGNALS_TO_HANDLE"]
        assert int(started["settings"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 100
        assert (rehearsal.folder / f"out/{name}/logs/machine-{machine}.log").exists()


def test_a_set_up_is_proven_in_a_job_that_is_not_started_again(rehearsal):
    rehearsal.assert_ended(rehearsal.submit("0", SCRIPT="prove.py"))
    words = rehearsal.started(0, 1)["words"]
    assert "train.py" not in words
    assert words[-1] == "run.dir=out/ddp"
    assert words[words.index("--max_restarts") + 1] == "0"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("end", "code"), [("2", 2), ("1", 1), ("crash", 9), ("75", 75), ("143+", 143)]
)
def test_a_failed_or_stuck_job_ends_with_the_code_of_the_run(rehearsal, end, code):
    rehearsal.run_dir.mkdir(parents=True)
    (rehearsal.run_dir / "exit_code").write_text("0")  # of the attempt before
    job = rehearsal.submit(end)
    rehearsal.assert_ended(job, "FAILED", code)
    assert rehearsal.slurm.about(job)["Restarts"] == "0"


def test_a_job_that_cannot_start_says_what_is_missing(rehearsal):
    for changes, words in (
        ({"CONFIG": "accelerate_configs/none.yaml"}, "CONFIG=accelerate_configs/none.yaml"),
        ({}, "submit from the repository's folder"),
    ):
        job = rehearsal.submit("0", **changes)
        rehearsal.assert_ended(job, "FAILED", 2)
        assert words in rehearsal.slurm.output(job)
        (rehearsal.folder / "train.py").unlink(missing_ok=True)


@pytest.mark.thorough
def test_a_stopped_job_is_started_again_with_the_same_words(rehearsal):
    job = rehearsal.submit("75+", "at-SIGUSR1-75+", "0")
    rehearsal.wait_for(attempt=1)
    rehearsal.slurm.signal(job, "USR1")
    rehearsal.assert_completed_after(2, job)
    for machine in (0, 1):
        assert rehearsal.started(0, machine) == rehearsal.started(2, machine)
        log = (rehearsal.run_dir / f"logs/machine-{machine}.log").read_text()
        assert [f"attempt {number}" in log for number in (1, 2, 3)] == [True] * 3
    assert rehearsal.slurm.output(job).count("stopped with a snapshot; back to the queue") == 2


def test_each_task_of_an_array_is_a_run_and_is_started_again_by_itself(rehearsal):
    """The first ends at once. The second is stopped once, and its id may be that of the array."""
    options = ("--array=1-2", "--nodes=1", "--cpus-per-task=1")
    job = rehearsal.submit("0", "-", "75+", "0", options=options)
    for task, restarts in ((1, 0), (2, 1)):
        rehearsal.assert_completed_after(restarts, f"{job}_{task}")
        run_dir = rehearsal.folder / f"out/ddp-{task}"
        assert (run_dir / "exit_code").read_text() == "0"
        assert len([*run_dir.glob("started-*.json")]) == restarts + 1


@pytest.mark.slow
@pytest.mark.parametrize("end", ["143+", "75", "crash"])
def test_a_preempted_job_is_started_again(rehearsal, end):
    job = rehearsal.submit_and_wait(f"at-SIGTERM-{end}", "0")
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive")
    rehearsal.assert_ended(rehearsal.slurm.submit("--wrap=true", options=urgent))
    rehearsal.assert_completed_after(1, job)
    assert "preempted; back to the queue" in rehearsal.slurm.output(job)


@pytest.mark.thorough
def test_a_job_comes_back_when_a_machine_fails(rehearsal):
    job, slurm = rehearsal.submit_and_wait("at-SIGUSR1-75+", "0"), rehearsal.slurm
    slurm.fail(MACHINES[1])
    slurm.wait_until(lambda: slurm.about(job)["JobState"] == "PENDING")
    slurm.boot(MACHINES[1])
    rehearsal.assert_completed_after(1, job)


@pytest.mark.thorough
def test_a_cancelled_job_does_not_come_back(rehearsal):
    job = rehearsal.submit_and_wait("at-SIGTERM-143+")
    rehearsal.slurm.call("scancel", str(job))
    assert rehearsal.slurm.end_of(job)[0] == "CANCELLED"
    assert (rehearsal.run_dir / "exit_code").read_text() == "143"  # it had time for that


def trained(
    slurm: Cluster, small: list[str], run_dir: Path, steps: int = STEPS, script: str = SCRIPTS[0]
) -> int:
    """Submit a job that trains on CPUs, one process on each machine."""
    run_dir.mkdir(parents=True)
    config = f"{Path(script).stem}_multinode.yaml"
    path = runs.rehearsal(config, run_dir, 1, num_machines=2, num_processes=2)
    words = [f"train.max_steps={steps}", "train.eval_every=100", f"run.dir={run_dir}"]
    return slurm.submit(
        script,
        *small,
        "model.dropout=0.1",
        *words,
        options=(f"--job-name={run_dir.name}",),
        PATH=f"{Path(sys.executable).parent}:{slurm.environment['PATH']}",
        CONFIG=str(path),
        PROCESSES_PER_MACHINE="1",
    )


def assert_trained(slurm: Cluster, job: int, run_dir: Path, steps: int = STEPS) -> str:
    """The job ends well, after all steps, and was two processes. The first machine's log."""
    ended = slurm.end_of(job)
    logs = {log.name: log.read_text() for log in sorted((run_dir / "logs").iterdir())}
    assert ended == ("COMPLETED", 0), logs
    assert sorted(logs) == ["machine-0.log", "machine-1.log"]
    assert "machine   2 processes, CPU" in logs["machine-0.log"]
    assert len(runs.losses(run_dir)) == steps
    assert runs.snapshot(run_dir, steps).is_dir()
    return logs["machine-0.log"]


@pytest.fixture(scope="module")
def undisturbed(slurm, small, tmp_path_factory) -> Path:
    """The directory of a run whose job went through in one attempt."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert_trained(slurm, trained(slurm, small, run_dir), run_dir)
    return run_dir


@pytest.mark.slow
def test_a_job_trains_on_two_machines_that_share_a_model(slurm, small, tmp_path):
    run_dir = tmp_path / "shared"
    job = trained(slurm, small, run_dir, steps=30, script=SCRIPTS[1])
    assert "FSDP" in assert_trained(slurm, job, run_dir, steps=30)


@pytest.mark.parametrize("proctrack", ["linuxproc", "pgid"])
@pytest.mark.slow
def test_a_requeued_run_ends_with_the_same_bits(
    small, undisturbed, tmp_path, tmp_path_factory, proctrack
):
    with cluster(tmp_path_factory.mktemp("other"), proctrack) as slurm:
        run_dir = tmp_path / "stopped"
        job = trained(slurm, small, run_dir)
        slurm.wait_until(lambda: runs.newest_step(run_dir) > STEPS // 10)
        slurm.signal(job, "USR1")
        assert_trained(slurm, job, run_dir)
        assert slurm.about(job)["Restarts"] == "1", slurm.output(job)
    runs.assert_same_bits(runs.snapshot(undisturbed, STEPS), runs.snapshot(run_dir, STEPS))
    assert runs.losses(run_dir) == runs.losses(undisturbed)
