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
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import runs

CARD = "eth0"
"""A host's network interface, by that name inside it."""
PORT = 29500
"""Where the first host waits for the others: free on every host, whatever runs beside."""
NUMBER = os.getpid() % 256
"""Of this process's network: others may be there at the same time."""
NAME, SWITCH = f"gpt{NUMBER}", f"gpt{NUMBER}-switch"
TEST, FIRST = 1, 11
"""The last numbers in the addresses of the test and of the first host."""
NOWHERE = "02:77:00:00:ff:ff"
"""The address of no interface."""
TOOLS = ("ip", "nsenter", "unshare", "mount")
PROBE = """
ip link add probe0 type bridge && ip link add probe1 type veth peer name probe2 && mount --bind / /
"""
ENTER = 'echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && shift 2 && '


def address(end: int) -> str:
    """The address of the test or of a host, by its last number."""
    return f"10.77.{NUMBER}.{end}"


def hardware(end: int) -> str:
    """The same of the interface."""
    return f"02:77:00:00:{NUMBER:02x}:{end:02x}"


class Host:
    """A machine, up from the beginning; `rank` counts them from 0."""

    def __init__(self, rank: int, count: int, names: Path) -> None:
        self.rank, self.name = rank, f"{NAME}-{rank}"
        self.address, self.outside = address(FIRST + rank), address(TEST)
        """Of this host; and where it reaches the test."""
        self._names = names
        """What every host has as its /etc/hosts."""
        self._others = [FIRST + other for other in range(count) if other != rank]
        self._port = f"port{rank}"

    def start(
        self, words: list[str], into: Path | None = None, **changes: str
    ) -> AbstractContextManager[subprocess.Popen]:
        """`runs.started` on this host; every step of the command replaces the one before."""
        enter = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "--mount"]
        script = ["sh", "-c", f'{ENTER} exec "$@"', "sh", self.name, str(self._names)]
        cards = {"GLOO_SOCKET_IFNAME": CARD, "NCCL_SOCKET_IFNAME": CARD}
        return runs.started([*enter, *script, *words], into, **cards, **changes)

    def launch_command(
        self, config: Path, *arguments: str, options: tuple[str, ...] = ()
    ) -> list[str]:
        """`accelerate launch` as this host's part of it; the config file is that of `across`."""
        mine = (f"--main_process_port={PORT}", f"--machine_rank={self.rank}")
        return runs.launch_command(config, *arguments, options=(*mine, *options))

    def processes(self) -> list[int]:
        """The ids of what runs on this host."""
        return [int(pid) for pid in _ip(f"netns pids {self.name}").split()]

    def cut(self) -> None:
        """Pull its cable out of the switch. What is sent either way is lost, without a word.

        The interface stays up and keeps its addresses: with `ip link set down`, or where
        neighbours are looked for anew, the sender would be told that there is no way.
        """
        _ip(f"-n {SWITCH} link set {self._port} nomaster")

    def join(self) -> None:
        """Put the cable back."""
        _ip(f"-n {SWITCH} link set {self._port} master bridge")

    def lose(self) -> None:
        """Lose the way to the test, and so to its hub, and to nothing else; without a word."""
        self._know(TEST, NOWHERE)

    def find(self) -> None:
        """Have it back."""
        self._know(TEST, hardware(TEST))

    def kill(self) -> None:
        """Take its power: nothing runs there any more, and the others are told nothing."""
        self.cut()  # first, so that no connection can say that it ends
        while pids := self.processes():  # also what they start meanwhile
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    _kill(pid)

    def boot(self) -> None:
        """Start it anew: the same name and address, no process, and no connection of before."""
        if self.name in _ip("netns list").split():
            self.kill()
            _ip(f"-n {SWITCH} link delete {self._port}")
            _ip(f"netns delete {self.name}")
        _ip(f"netns add {self.name}")
        card = f"{CARD} address {hardware(FIRST + self.rank)} netns {self.name}"
        _ip(f"-n {SWITCH} link add {self._port} type veth peer name {card}")
        _ip(f"-n {SWITCH} link set {self._port} master bridge up")
        _ip(f"-n {self.name} link set lo up")
        _ip(f"-n {self.name} address add {self.address}/24 dev {CARD}")
        _ip(f"-n {self.name} link set {CARD} up")
        # Known for ever: a host that is gone is silent, as one behind a router, not unreachable.
        for end in (*self._others, TEST):
            self._know(end, hardware(end))

    def _know(self, end: int, at: str) -> None:
        _ip(f"-n {self.name} neighbour replace {address(end)} lladdr {at} dev {CARD}")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts that reach each other and the test. Skips where they cannot be made."""
    if missing := _missing():
        pytest.skip(missing)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as left:
        names = Path(folder) / "hosts"
        found = [Host(rank, count, names) for rank in range(count)]
        lines = [f"{host.address} {host.name}" for host in found]
        names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        _ip(f"netns add {SWITCH}")
        left.callback(_ip, f"netns delete {SWITCH}")  # and the cables' ends in it, so both ends
        _ip(f"-n {SWITCH} link add bridge up type bridge")
        here = f"{NAME} address {hardware(TEST)}"
        _ip(f"link add {here} type veth peer name uplink netns {SWITCH}")
        left.callback(_ip, f"link delete {NAME}")  # with its switch it would go some time later
        _ip(f"-n {SWITCH} link set uplink master bridge up")
        _ip(f"address add {address(TEST)}/24 dev {NAME}")
        _ip(f"link set {NAME} up")
        for host in found:
            host.boot()
            left.callback(_ip, f"netns delete {host.name}")
            left.callback(host.kill)
            place = f"{host.address} lladdr {hardware(FIRST + host.rank)} dev {NAME}"
            _ip(f"neighbour replace {place}")
        yield found


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


def _missing() -> str | None:
    """Why hosts cannot be made here; None where they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "hosts of their own network can be made by root only"
    if absent := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"hosts of their own network need {', '.join(absent)} (iproute2, util-linux)"
    words = ["unshare", "--net", "--uts", "--mount", "sh", "-c", PROBE]
    probed = subprocess.run(words, capture_output=True, text=True, check=False)
    if probed.returncode != 0:
        return f"hosts of their own network cannot be made here: {probed.stderr.strip()}"
    return None


def _kill(pid: int) -> None:
    """kill -9. It is seen to end without being reaped: its exit code is for who started it."""
    watched = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(watched, signal.SIGKILL)
        select.select([watched], [], [])
    finally:
        os.close(watched)


def _ip(words: str) -> str:
    done = subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)
    return done.stdout
