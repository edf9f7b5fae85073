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
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol")
START_SECONDS, CALL_SECONDS, STOP_SECONDS = 300, 120, 60
POLL_SECONDS = 0.1
FINISHED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

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
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """The commands of a running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.daemons = folder, []
        own = {
            name: value
            for name, value in runs.environment().items()
            if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))  # the tests may be a job too
        }
        self.environment = {**own, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *words: str, folder: Path = runs.ROOT, **changes: str) -> str:
        """What a command of Slurm's prints."""
        environment = {**self.environment, **changes}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(
            words, **pipes, timeout=CALL_SECONDS, env=environment, cwd=folder, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}"
        return done.stdout

    def submit(
        self,
        script: str,
        *words: str,
        options: tuple[str, ...] = (),
        folder: Path = runs.ROOT,
        **changes: str,
    ) -> int:
        """`sbatch` from a folder, with the output of the job beside the cluster's; its number."""
        options = ("--parsable", f"--output={self.folder}/job-%j.out", *options)
        printed = self.call("sbatch", *options, script, *words, folder=folder, **changes)
        return int(printed.split()[0])

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

    def wait_until(
        self, holds: Callable[[], object], seconds: float = runs.DEADLINE_SECONDS
    ) -> None:
        """Wait until something holds; fails at the deadline with what daemons and jobs say."""
        end = time.monotonic() + seconds
        while not holds():
            said = [*self.folder.glob("*.log"), *self.folder.glob("job-*.out")]
            story = "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in said)
            assert time.monotonic() < end, f"not within {seconds} s\n{story}"
            time.sleep(POLL_SECONDS)

    def end_of(self, job: int | str) -> tuple[str, int]:
        """The last state of a job that is over for good, and its exit code."""
        self.wait_until(lambda: self.about(job)["JobState"] in FINISHED)
        about = self.about(job)
        return about["JobState"], int(about["ExitCode"].split(":")[0])

    def fail(self, machine: str) -> None:
        """Kill all that runs on a machine, and have Slurm find it gone, as it would in minutes."""
        self.kill(machine)
        self.call("scontrol", "update", f"NodeName={machine}", "State=DOWN", "Reason=test")

    def boot(self, machine: str) -> None:
        """Start a machine, again after `fail`."""
        self.start("slurmd", "-D", "-N", machine, machine=machine)

    def start(self, name: str, *words: str, machine: str = "") -> None:
        """Start a daemon, in the machine's own folder where it has one."""
        with open(self.folder / f"{name}{machine}.log", "a") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            place = {"env": self.environment, "cwd": self.folder / machine}
            self.daemons.append(subprocess.Popen([program(name), *words], **pipes, **place))

    def kill(self, machine: str = "") -> None:
        """kill -9 for all processes of the cluster, or of a machine, until there is none."""
        end = time.monotonic() + STOP_SECONDS
        while alive := [one for one in psutil.process_iter() if self._has(one, machine)]:
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(alive, timeout=1)
            assert time.monotonic() < end, f"cannot be killed: {alive}"

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
        return ours and machine in ("", environment.get("SLURMD_NODENAME"))

    def is_ready(self) -> bool:
        """Whether all machines are idle."""
        try:
            return self.call("scontrol", "show", "nodes").count("State=IDLE ") == len(MACHINES)
        except AssertionError:  # nobody answers yet
            return False


@contextlib.contextmanager
def cluster(folder: Path, proctrack: str = "linuxproc") -> Iterator[Cluster]:
    """A cluster that runs beside the tests, and nothing of it longer. Skips where none can be made.

    `proctrack` says how Slurm knows the processes of a job. With linuxproc a signal reaches all of
    them; with pgid, of launchers and workers, the launchers alone, as with cgroup on most clusters.
    """
    if absent := [name for name in PROGRAMS if program(name) is None]:
        pytest.skip(f"a Slurm cluster needs {', '.join(absent)}: apt-get install slurm-wlm munge")
    _configure(folder, proctrack)
    slurm = Cluster(folder)
    door = folder / "munge.socket"
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    try:
        slurm.start("munged", "--foreground", "--force", f"--socket={door}", *files)
        slurm.wait_until(door.exists, START_SECONDS)
        slurm.start("slurmctld", "-D", "-c")
        for machine in MACHINES:
            slurm.boot(machine)
        slurm.wait_until(slurm.is_ready, START_SECONDS)
        yield slurm
    finally:
        slurm.kill()
        for daemon in slurm.daemons:
            daemon.wait()


def _configure(folder: Path, proctrack: str) -> None:
    with contextlib.ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    text = CONFIGURATION.format(
        folder=folder,
        ports=ports,
        names=MACHINES,
        user=getpass.getuser(),
        proctrack=proctrack,
        first_job=random.randrange(1, 10_000),  # the port of a job's processes is made from it
        holds=f"CPUs={CORES} RealMemory=1000 Gres=gpu:{GPUS}",
    )
    (folder / "slurm.conf").write_text(text)
    version = subprocess.run([program("slurmd"), "-V"], capture_output=True, text=True, check=True)
    if version.stdout.split()[-1] >= "24.05":  # older ones have no such plugin, and do without one
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    for gpu in range(GPUS):
        (folder / f"gpu{gpu}").touch()
    for name in ("state", *MACHINES):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)


def program(name: str) -> str | None:
    """The path of a program, also where only root has its folder on the path."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
