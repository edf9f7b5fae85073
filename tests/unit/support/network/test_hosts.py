"""The hosts that tests train across: they reach each other, are cut, slowed and killed, and go."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts import Host, hosts
from loopback_hub import LoopbackHub

# The tests across machines, which are thorough or slow, rely on what is shown here.
pytestmark = pytest.mark.slow
PORT = 7000
ECHO = f"""
import socket
with socket.create_server(("", {PORT})) as listening:
    print("listening", flush=True)
    connection = listening.accept()[0]
    while content := connection.recv(1 << 20):
        connection.sendall(content)
"""
ASK = f"""
import socket, sys
with socket.create_connection((sys.argv[1], {PORT}), timeout=20) as connection:
    connection.sendall(socket.gethostbyname(socket.gethostname()).encode())
    print(connection.recv(100).decode())
"""
FETCH = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())
"""
SOON, LATER = 1.0, 20.0
"""Seconds that silence is listened to, and that an answer may take."""


@contextlib.contextmanager
def echoing(host: Host) -> Iterator[subprocess.Popen]:
    """A process on the host that sends back what it is sent."""
    with host.start([sys.executable, "-c", ECHO]) as process:
        assert process.stdout.readline() == "listening\n"
        yield process


@contextlib.contextmanager
def connected(host: Host) -> Iterator[socket.socket]:
    """The test's own connection to what echoes on a host."""
    with echoing(host), socket.create_connection((host.address, PORT), LATER) as connection:
        connection.sendall(b"before")
        assert connection.recv(100) == b"before"
        yield connection


def assert_silent(host: Host, connection: socket.socket) -> None:
    """Nothing comes back of what is sent, on a connection that there is or on a new one."""
    connection.settimeout(SOON)
    connection.sendall(b"meanwhile")
    with pytest.raises(TimeoutError):
        connection.recv(100)
    with pytest.raises(TimeoutError):
        socket.create_connection((host.address, PORT), SOON)


def test_hosts_reach_each_other_by_name_and_the_hub_of_the_test(tmp_path):
    with hosts(2) as (first, second):
        with echoing(first):
            asked = second.run([sys.executable, "-c", ASK, first.name])
        assert asked.stdout.split() == [second.address], asked.stderr
        with LoopbackHub(tmp_path, host=second.outside) as hub:
            hub.create("me/run", private=False)
            hub.commit_files("me/run", {"model.safetensors": b"whole"})  # of the other origin
            url = f"{hub.endpoint}/me/run/resolve/main/model.safetensors"
            fetched = second.run([sys.executable, "-c", FETCH, url], **hub.environment())
        assert fetched.stdout.split() == ["whole"], fetched.stderr


def test_a_host_that_is_cut_lost_or_killed_says_nothing():
    with hosts(2) as (first, second):
        for away, back in ((first.cut, first.join), (first.lose, first.find)):
            with connected(first) as connection:
                away()
                assert_silent(first, connection)
                if away == first.lose:  # to the test alone
                    with echoing(second):
                        asked = first.run([sys.executable, "-c", ASK, second.name])
                    assert asked.stdout.split() == [first.address], asked.stderr
                back()
                connection.settimeout(LATER)
                assert connection.recv(100) == b"meanwhile"
        with connected(first) as connection:
            assert first.processes()
            first.kill()
            assert not first.processes()
            assert_silent(first, connection)
        first.boot()
        with connected(first):
            pass


def test_nothing_is_left_of_hosts_when_their_test_fails():
    seen = {}

    def fail():
        with hosts(1) as (host,):
            words = host.inside(["sh", "-c", "echo there; exec sleep 1000"])
            left = subprocess.Popen(words, stdout=subprocess.PIPE)
            seen.update(host=host, left=left)
            with left.stdout:
                assert left.stdout.readline() == b"there\n"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen["left"].wait(LATER) == -signal.SIGKILL
    assert not Path("/run/netns", seen["host"].name).exists()
    assert not Path("/sys/class/net", seen["host"].name.partition("-")[0]).exists()
