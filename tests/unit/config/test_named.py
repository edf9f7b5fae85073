"""A misspelled path is never taken for the name of somebody's repo on the Hub."""

from __future__ import annotations

import pytest

from snapshot.errors import SnapshotError
from store.kinds import named_repo


@pytest.fixture(autouse=True)
def _in_a_folder_with_runs(tmp_path, monkeypatch):
    (tmp_path / "out" / "python-docs").mkdir(parents=True)
    (tmp_path / "notes").write_text("not a folder")
    monkeypatch.chdir(tmp_path)


def test_a_misspelled_path_is_not_asked_of_the_hub():
    for name in ("out/python-dcos", "out/python-docs@main", "notes/python-docs"):
        with pytest.raises(SnapshotError, match=f"no {name}, and .* here, so the Hub is not asked"):
            named_repo(name)


def test_a_repo_named_like_a_local_folder_can_be_named():
    assert named_repo("hf://out/python-dcos") == ("out/python-dcos", "main")
    assert named_repo("hf://out/python-docs@v1") == ("out/python-docs", "v1")


def test_what_exists_and_what_no_repo_can_be_called_is_a_path():
    for name in ("out/python-docs", "out", "./out/none", "/out/none", "a/b/c", "~/none", "../none"):
        assert named_repo(name) is None


def test_other_names_are_repos():
    assert named_repo("me/run") == ("me/run", "main")
    assert named_repo("me/run@abc/def") == ("me/run", "abc/def")
