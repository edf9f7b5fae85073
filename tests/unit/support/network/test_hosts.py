"""A host that is cut, lost or killed says nothing: the tests across machines rely on it."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

import pytest

from hosts import Host, hosts

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
SOON, LATER = 1.0, 20.0
"""Seconds that silence is listened to, and that an answer may take."""


@contextlib.contextmanager
def connected(host: Host) -> Iterator[socket.socket]:
    """The test's own connection to a process on a host that sends back what it is sent."""
    with host.start([sys.executable, "-c", ECHO]) as process:
        assert process.stdout.readline() == "listening\n"
        with socket.create_connection((host.address, PORT), LATER) as connection:
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


def test_a_host_that_is_cut_lost_or_killed_says_nothing():
    with hosts(2) as (first, _):
        for away, back in ((first.cut, first.join), (first.lose, first.find)):
            with connected(first) as connection:
                away()
                assert_silent(first, connection)
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
