"""Entries of a cache that processes share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.shared_files import make_once

DAMAGES: dict[str, Callable[[Path], object]] = {
    "a folder": lambda target: (target / "half").mkdir(parents=True),
    "a file": lambda target: target.write_text("damaged"),
    "a link to nothing": lambda target: target.symlink_to(target.with_name("unmounted")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_replaced(tmp_path, name):
    target = tmp_path / "entry"
    DAMAGES[name](target)
    make_once(
        target, lambda folder: (folder / "whole").touch(), lambda: (target / "whole").is_file()
    )
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert {path.name for path in tmp_path.iterdir()} <= {"entry", ".entry.lock"}
