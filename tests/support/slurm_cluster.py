"""A Slurm cluster for the tests: the real daemons, two machines that are both this one.

    with cluster(folder) as slurm:
        job = slurm.submit("slurm/ddp.sbatch", "train.max_steps=10")
        assert slurm.end_of(job) == ("COMPLETED", 0)

Everything is in the folder and on 127.0.0.1: configuration, key, sockets, state and logs. A Slurm
or munge that the machine has of its own is not touched, and one need not be root.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import runs

MACHINES = ("127.0.0.1", "127.0.0.2")
"""Their names are addresses that lead here, because jobs find each other by the names."""
GPUS, CORES = 4, 16
"""Of each machine, as the cluster believes. No process is kept to them."""
GRACE_SECONDS = 60
"""Between a preemption's SIGTERM and its SIGKILL."""
DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "scancel", "scontrol")
START_SECONDS, CALL_SECONDS, STOP_SECONDS = 300, 120, 60
POLL_SECONDS = 0.1
NAME = "SLURMD_NODENAME"
"""Of the machine, in the environment of what a job runs there."""
FINISHED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
)
INSTALL = "apt-get install slurm-wlm munge"

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu

# A requeued job starts again when its credential has expired, at the next look of the scheduler.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SchedulerParameters=sched_interval=1,bf_interval=1
FirstJobId={first_job}

PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={names[0]} NodeHostName={names[0]} NodeAddr=127.0.0.1 Port={ports[1]} {holds}
NodeName={names[1]} NodeHostName={names[1]} NodeAddr=127.0.0.1 Port={ports[2]} {holds}
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """The commands of a running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen] = {}
        own = {
            name: value
            for name, value in runs.environment().items()
            if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))  # the tests may be a job too
        }
        self.environment = {**own, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *words: str, folder: Path = runs.ROOT, **changes: str) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=CALL_SECONDS,
            env={**self.environment, **changes},
            cwd=folder,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout + done.stderr

    def submit(
        self,
        script: str,
        *words: str,
        options: tuple[str, ...] = (),
        folder: Path = runs.ROOT,
        **changes: str,
    ) -> int:
        """`sbatch` from a folder, with the output of the job beside the cluster's; its number."""
        output = f"--output={self.folder}/job-%j.out"
        printed = self.call(
            "sbatch", "--parsable", output, *options, script, *words, folder=folder, **changes
        )
        return int(printed.splitlines()[0])

    def about(self, job: int | str) -> dict[str, str]:
        """What Slurm knows of a job, or of a task of an array: `<job>_<task>`."""
        line = self.call("scontrol", "show", "job", "--oneliner", str(job))
        return dict(re.findall(r"(\S+?)=(\S*)", line))

    def output(self, job: int | str) -> str:
        """What the job's script has said."""
        path = self.folder / f"job-{job}.out"
        return path.read_text() if path.exists() else ""

    def signal(self, job: int, name: str) -> None:
        """A signal to what the job's machines run, not to its script: as `--signal` sends it."""
        self.call("scancel", f"--signal={name}", str(job))

    def wait_until(self, holds: Callable[[], object], job: int | str) -> None:
        """Wait until something holds; fails with the job's story at the deadline."""
        end = time.monotonic() + runs.DEADLINE_SECONDS
        while not holds():
            assert time.monotonic() < end, f"not before the deadline\n{self.story(job)}"
            time.sleep(POLL_SECONDS)

    def end_of(self, job: int | str) -> tuple[str, int]:
        """The last state of a job that is over for good, and its exit code."""
        self.wait_until(lambda: self.about(job)["JobState"] in FINISHED, job)
        about = self.about(job)
        return about["JobState"], int(about["ExitCode"].split(":")[0])

    def fail(self, machine: str) -> None:
        """Kill all that runs on a machine, and have Slurm find it gone, as it would in minutes."""
        self._kill(machine)
        self.call("scontrol", "update", f"NodeName={machine}", "State=DOWN", "Reason=test")

    def boot(self, machine: str) -> None:
        """Start a machine, again after `fail`."""
        self.start("slurmd", "-D", "-N", machine, machine=machine)

    def start(self, name: str, *words: str, machine: str = "") -> None:
        """Start a daemon, in the machine's own folder where it has one."""
        program = _program(name)
        assert program is not None
        label = f"{name}{machine}"
        with open(self.folder / f"{label}.log", "a") as log:
            self.daemons[label] = subprocess.Popen(
                [program, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.folder / machine,
            )

    def stop(self) -> None:
        """Kill all that there is of the cluster."""
        self._kill()

    def wait_for_start(self, holds: Callable[[], object]) -> None:
        """Wait until something holds that the daemons are to bring about."""
        end = time.monotonic() + START_SECONDS
        while not holds():
            assert time.monotonic() < end, f"not within {START_SECONDS} s\n{self._said()}"
            for label, daemon in self.daemons.items():
                assert daemon.poll() is None, f"{label} ended\n{self._said()}"
            time.sleep(POLL_SECONDS)

    def _kill(self, machine: str = "") -> None:
        """kill -9 for all processes, or a machine's, until there is none."""
        end = time.monotonic() + STOP_SECONDS
        while alive := [one for one in psutil.process_iter() if self._has(one, machine)]:
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(alive, timeout=1)
            assert time.monotonic() < end, f"cannot be killed: {alive}"
        self.daemons = {
            label: daemon for label, daemon in self.daemons.items() if daemon.poll() is None
        }

    def _has(self, process: psutil.Process, machine: str) -> bool:
        """Whether a process is the cluster's, and the machine's if one is given."""
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            folder, environment = Path(process.cwd()), process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False
        # Daemons, and Slurm's own processes for a job, whose environment is overwritten.
        if folder.is_relative_to(self.folder / machine):
            return True
        ours = environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]
        return ours and machine in ("", environment.get(NAME))

    def _said(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in logs)

    def story(self, job: int | str) -> str:
        """All that may say why a job does not do what it should."""
        return f"{self.call('scontrol', 'show', 'job', str(job))}\n{self.output(job)}"


def missing() -> str | None:
    """Why there can be no cluster here; None where there can."""
    absent = [name for name in (*DAEMONS, *CLIENTS) if _program(name) is None]
    return f"a Slurm cluster needs {', '.join(absent)}: {INSTALL}" if absent else None


def version() -> str:
    """Of the Slurm that is installed, as in 22.05."""
    program = _program("slurmd")
    assert program is not None
    said = subprocess.run([program, "-V"], capture_output=True, text=True, check=True).stdout
    return ".".join(re.findall(r"\d+", said)[:2])


@contextlib.contextmanager
def cluster(folder: Path, proctrack: str = "linuxproc") -> Iterator[Cluster]:
    """A cluster that runs beside the tests, and nothing of it longer. Skips where none can be made.

    `proctrack` says how Slurm knows the processes of a job. With linuxproc a signal reaches all of
    them; with pgid, of launchers and workers, the launchers alone, as with cgroup on most clusters.
    """
    if reason := missing():
        pytest.skip(reason)
    _configure(folder, proctrack)
    slurm = Cluster(folder)
    door = folder / "munge.socket"
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    try:
        slurm.start("munged", "--foreground", "--force", f"--socket={door}", *files)
        slurm.wait_for_start(door.exists)
        slurm.start("slurmctld", "-D", "-c")
        for machine in MACHINES:
            slurm.boot(machine)
        slurm.wait_for_start(lambda: _idle(slurm) == len(MACHINES))
        yield slurm
    finally:
        slurm.stop()


def _configure(folder: Path, proctrack: str) -> None:
    with contextlib.ExitStack() as open_sockets:
        found = [open_sockets.enter_context(socket.socket()) for _ in range(3)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in found]
    text = CONFIGURATION.format(
        folder=folder,
        ports=ports,
        names=MACHINES,
        user=getpass.getuser(),
        proctrack=proctrack,
        first_job=random.randrange(1, 10_000),  # the port of a job's processes is made from it
        grace=GRACE_SECONDS,
        holds=f"CPUs={CORES} RealMemory=1000 Gres=gpu:{GPUS}",
    )
    (folder / "slurm.conf").write_text(text)
    if version() >= "24.05":  # older ones have no such plugin, and do without one
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    for gpu in range(GPUS):
        (folder / f"gpu{gpu}").touch()
    for name in ("state", *MACHINES):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)


def _program(name: str) -> str | None:
    """The path of a program, also where only root has its folder on the path."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


def _idle(slurm: Cluster) -> int:
    """How many machines are ready; 0 as long as nobody answers."""
    asked = subprocess.run(
        ["scontrol", "show", "nodes", "--oneliner"],
        capture_output=True,
        text=True,
        timeout=CALL_SECONDS,
        env=slurm.environment,
        check=False,
    )
    return len(re.findall(r" State=IDLE ", asked.stdout))
