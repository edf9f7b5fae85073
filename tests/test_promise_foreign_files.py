"""Nothing that the program did not create is ever removed or overwritten, in any folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from snapshot.base import Base
from snapshot.errors import SnapshotError
from snapshot.referenced_base import keep_base

WEIGHTS = "model.safetensors"


def model_in(folder: Path, content: str = "the user's only copy") -> Base:
    """A model of the user's, with a file that is no part of it."""
    folder.mkdir(parents=True)
    for name in (WEIGHTS, "config.json", "notes.txt"):
        (folder / name).write_text(f"{name}: {content}")
    return Base("model.pretrained", str(folder), folder)


def everything_in(folder: Path) -> dict[str, str]:
    """The content of every file below a folder, links included."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def no_links(monkeypatch):
    """As between two file systems."""

    def link(*_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", link)


def test_a_base_in_the_runs_directory_stays_as_it_is(tmp_path):
    base = model_in(tmp_path / "run" / "base")
    before = everything_in(tmp_path / "run")
    assert keep_base(base, tmp_path / "run").folder == base.folder
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "base").symlink_to(base.folder)
    assert keep_base(base, tmp_path / "other").folder == base.folder
    assert everything_in(tmp_path / "run") == before


@pytest.mark.parametrize("linked", [False, True])
def test_another_model_in_the_runs_directory_is_refused_and_stays(tmp_path, linked):
    run_dir, base = tmp_path / "run", model_in(tmp_path / "named")
    place = model_in(tmp_path / "other" if linked else run_dir / "base", "another").folder
    run_dir.mkdir(exist_ok=True)
    if linked:
        (run_dir / "base").symlink_to(place)
    before = everything_in(tmp_path)
    with pytest.raises(SnapshotError, match="move it away, or give the run another run.name"):
        keep_base(base, run_dir)
    assert everything_in(tmp_path) == before


def test_a_base_that_cannot_be_linked_stays_where_it_is_with_all_files_beside_it(
    tmp_path, no_links
):
    run_dir, base = tmp_path / "run", model_in(tmp_path / "named")
    assert keep_base(base, run_dir) == base
    assert list(run_dir.iterdir()) == []
    (run_dir / "base").mkdir()
    (run_dir / "base" / "notes.txt").write_text("the user's")
    before = everything_in(tmp_path)
    assert keep_base(base, run_dir) == base
    assert everything_in(tmp_path) == before


def test_a_copied_base_is_whole_or_absent_and_kept_once(tmp_path, no_links, monkeypatch):
    run_dir, base = tmp_path / "run", model_in(tmp_path / "step-00000010")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", lambda _, to: Path(to).write_text("hal"))
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):  # where a kill -9 may come, too
            keep_base(base, run_dir)
    for _ in range(2):
        kept = keep_base(base, run_dir).folder
        assert kept == run_dir / "base"
        assert {path.name for path in kept.iterdir()} == {WEIGHTS, "config.json"}
        assert (kept / WEIGHTS).read_text() == (base.folder / WEIGHTS).read_text()
