"""Hosts for training across machines: each has its own network, name and processes.

    with hosts(2) as (first, second):
        with first.start(words) as process:
            second.cut()

They are network namespaces around a switch, which is one more. Processor and disk are those of the
test, so each run gets folders of its own. The test itself is on the switch too: a hub that listens
at `first.outside` is reached from every host, and from nowhere else. No packet leaves the machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

import runs

CARD = "eth0"
"""A host's network interface, by that name inside it."""
PORT = 29500
"""Where the first host waits for the others: free on every host, whatever runs beside."""
NUMBERS = range(256)
"""Networks that may be there at the same time."""
TEST, FIRST = 1, 11
"""The last numbers in the addresses of the test and of the first host."""
NOWHERE = "02:77:00:00:ff:ff"
"""The address of no interface."""
TOOLS = ("ip", "nsenter", "unshare", "mount")
PROBE = """
ip link add probe0 type bridge && ip link add probe1 type veth peer name probe2 && mount --bind / /
"""
ENTER = 'echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && shift 2 && '


class Network:
    """A switch, a cable from it to the test, and one to each host."""

    def __init__(self, number: int, count: int, folder: Path) -> None:
        self.name = f"gpt{number}"
        self.switch = f"{self.name}-switch"
        self.names = folder / "hosts"
        """What every host has as its /etc/hosts."""
        self._number = number
        self.hosts = [Host(self, rank) for rank in range(count)]

    def address(self, end: int) -> str:
        """The address of the test or of a host, by its last number."""
        return f"10.77.{self._number}.{end}"

    def hardware(self, end: int) -> str:
        """The same of the interface."""
        return f"02:77:00:00:{self._number:02x}:{end:02x}"

    def lay(self) -> None:
        """Put up the switch and the hosts."""
        lines = [f"{host.address} {host.name}" for host in self.hosts]
        self.names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        _ip(f"netns add {self.switch}")
        _ip(f"-n {self.switch} link add bridge up type bridge")
        here = f"{self.name} address {self.hardware(TEST)}"
        _ip(f"link add {here} type veth peer name uplink netns {self.switch}")
        _ip(f"-n {self.switch} link set uplink master bridge up")
        _ip(f"address add {self.address(TEST)}/24 dev {self.name}")
        _ip(f"link set {self.name} up")
        for host in self.hosts:
            host.boot()
            _ip(f"neighbour replace {host.address} lladdr {host.hardware} dev {self.name}")

    def remove(self) -> None:
        """Take everything down, whatever there is of it."""
        spaces = [line.split()[0] for line in _ip("netns list").splitlines()]
        for space in spaces:
            if re.fullmatch(rf"{self.name}-(switch|\d+)", space):
                _kill_inside(space)
                _ip(f"netns delete {space}")
        if Path("/sys/class/net", self.name).exists():
            # Its other end went with the switch's namespace, perhaps this one as well by now.
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(f"link delete {self.name}")


class Host:
    """A machine, up from the beginning; `rank` counts them from 0."""

    def __init__(self, network: Network, rank: int) -> None:
        self.rank = rank
        self.name = f"{network.name}-{rank}"
        """Of the host; the others find its address by it."""
        self.address = network.address(FIRST + rank)
        self.outside = network.address(TEST)
        """Where this host reaches the test."""
        self.hardware = network.hardware(FIRST + rank)
        self._network = network
        self._port = f"port{rank}"

    def start(
        self, words: list[str], into: Path | None = None, **changes: str
    ) -> AbstractContextManager[subprocess.Popen]:
        """`runs.started` on this host."""
        return runs.started(self.inside(words), into, **_with_card(changes))

    def run(
        self, words: list[str], deadline: float = runs.DEADLINE_SECONDS, **changes: str
    ) -> subprocess.CompletedProcess:
        """`runs.run` on this host."""
        return runs.run(self.inside(words), deadline, **_with_card(changes))

    def launch_command(
        self, config: Path, *arguments: str, options: tuple[str, ...] = ()
    ) -> list[str]:
        """`accelerate launch` as this host's part of it; the config file is that of `across`."""
        mine = (f"--main_process_port={PORT}", f"--machine_rank={self.rank}")
        return runs.launch_command(config, *arguments, options=(*mine, *options))

    def processes(self) -> list[int]:
        """The ids of what runs on this host."""
        return _processes(self.name)

    def cut(self) -> None:
        """Pull its cable out of the switch. What is sent either way is lost, without a word.

        The interface stays up and keeps its addresses: with `ip link set down`, or where
        neighbours are looked for anew, the sender would be told that there is no way.
        """
        self._switch(f"link set {self._port} nomaster")

    def join(self) -> None:
        """Put the cable back."""
        self._switch(f"link set {self._port} master bridge")

    def lose(self) -> None:
        """Lose the way to the test, and so to its hub, and to nothing else; without a word."""
        self._find(NOWHERE)

    def find(self) -> None:
        """Have it back."""
        self._find(self._network.hardware(TEST))

    def kill(self) -> None:
        """Take its power: nothing runs there any more, and the others are told nothing."""
        self.cut()  # first, so that no connection can say that it ends
        _kill_inside(self.name)

    def boot(self) -> None:
        """Start it anew: the same name and address, no process, and no connection of before."""
        if self.name in _ip("netns list").split():
            self.kill()
            self._switch(f"link delete {self._port}")
            _ip(f"netns delete {self.name}")
        _ip(f"netns add {self.name}")
        card = f"{CARD} address {self.hardware} netns {self.name}"
        self._switch(f"link add {self._port} type veth peer name {card}")
        self._switch(f"link set {self._port} master bridge up")
        _ip(f"-n {self.name} link set lo up")
        _ip(f"-n {self.name} address add {self.address}/24 dev {CARD}")
        _ip(f"-n {self.name} link set {CARD} up")
        # Known for ever: a host that is gone is silent, as one behind a router, not unreachable.
        known = [(host.address, host.hardware) for host in self._network.hosts if host is not self]
        for address, hardware in known:
            _ip(f"-n {self.name} neighbour replace {address} lladdr {hardware} dev {CARD}")
        self.find()

    def inside(self, words: list[str]) -> list[str]:
        """The command that is `words` on this host; every step replaces the one before."""
        enter = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "--mount"]
        names = [self.name, str(self._network.names)]
        return [*enter, "sh", "-c", f'{ENTER} exec "$@"', "sh", *names, *words]

    def _find(self, hardware: str) -> None:
        _ip(f"-n {self.name} neighbour replace {self.outside} lladdr {hardware} dev {CARD}")

    def _switch(self, words: str) -> None:
        _ip(f"-n {self._network.switch} {words}")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts that reach each other and the test. Skips where they cannot be made."""
    if missing := _missing():
        pytest.skip(missing)
    with _free_number() as number, tempfile.TemporaryDirectory() as folder:
        network = Network(number, count, Path(folder))
        network.remove()  # what a test left that was killed
        try:
            network.lay()
            yield network.hosts
        finally:
            network.remove()


def across(machines: list[Host], config: str, folder: Path, **changes: object) -> Path:
    """A shipped config file for these hosts, with one process on each."""
    count = len(machines)
    there = {
        "num_machines": count,
        "main_process_ip": machines[0].address,
        "rdzv_backend": "static",
        "same_network": True,
    }
    return runs.rehearsal(config, folder, count, **{**there, **changes})


@contextlib.contextmanager
def _free_number() -> Iterator[int]:
    """A number that no other test process has, until this one is done with it or ends."""
    for number in NUMBERS:
        lock = FileLock(Path(tempfile.gettempdir(), f"gpt-test-hosts-{number}.lock"), timeout=0)
        try:
            lock.acquire()
        except Timeout:
            continue
        try:
            yield number
        finally:
            lock.release()
        return
    raise AssertionError(f"{len(NUMBERS)} networks of tests at the same time")


def _missing() -> str | None:
    """Why hosts cannot be made here; None where they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "hosts of their own network can be made by root only"
    absent = [tool for tool in TOOLS if not shutil.which(tool)]
    if absent:
        return f"hosts of their own network need {', '.join(absent)} (iproute2, util-linux)"
    words = ["unshare", "--net", "--uts", "--mount", "sh", "-c", PROBE]
    probed = subprocess.run(words, capture_output=True, text=True, check=False)
    if probed.returncode != 0:
        return f"hosts of their own network cannot be made here: {probed.stderr.strip()}"
    return None


def _with_card(changes: dict[str, str]) -> dict[str, str]:
    return {"GLOO_SOCKET_IFNAME": CARD, "NCCL_SOCKET_IFNAME": CARD, **changes}


def _processes(space: str) -> list[int]:
    return [int(pid) for pid in _ip(f"netns pids {space}").split()]


def _kill_inside(space: str) -> None:
    """kill -9 for all in a namespace, and what they start meanwhile; returns when none is left."""
    while pids := _processes(space):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                _kill(pid)


def _kill(pid: int) -> None:
    # Seen to end without being reaped: its exit code is for whoever started it.
    watched = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(watched, signal.SIGKILL)
        select.select([watched], [], [])
    finally:
        os.close(watched)


def _ip(words: str) -> str:
    return _call(["ip", *words.split()])


def _call(words: list[str]) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
