"""The store where machines meet: a port that it cannot have is named, without a traceback."""

from __future__ import annotations

import socket

import pytest

from cloud import meet


@pytest.mark.parametrize(
    ("port", "words"), [(None, "cannot be opened"), (99_999, "99999 is no port")]
)
def test_a_port_that_cannot_be_had_is_named(monkeypatch, capsys, port, words):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1] if port is None else port
        monkeypatch.setattr("sys.argv", ["meet", str(port)])
        with pytest.raises(SystemExit, match="2"):
            meet.main()
    error = capsys.readouterr().err
    assert words in error
    assert str(port) in error
    assert "Traceback" not in error
