"""A misspelled path is never taken for the name of somebody's repo on the Hub."""

from __future__ import annotations

import pytest

from snapshot.errors import SnapshotError
from store.kinds import named_repo

REPOS = {
    "hf://out/python-dcos": ("out/python-dcos", "main"),  # which is named like a local folder
    "hf://out/python-docs@v1": ("out/python-docs", "v1"),
    "me/run": ("me/run", "main"),
    "me/run@abc/def": ("me/run", "abc/def"),
    # What exists, and what no repo can be called.
    **dict.fromkeys(("out/python-docs", "out", "./out/none", "/out/none", "a/b/c", "~/none")),
    "../none": None,
}


def test_names_of_repos_are_told_from_paths(tmp_path, monkeypatch):
    (tmp_path / "out" / "python-docs").mkdir(parents=True)
    (tmp_path / "notes").write_text("not a folder")
    monkeypatch.chdir(tmp_path)
    assert {name: named_repo(name) for name in REPOS} == REPOS
    for name in ("out/python-dcos", "out/python-docs@main", "notes/python-docs"):
        with pytest.raises(SnapshotError, match=f"no {name}, and .* here, so the Hub is not asked"):
            named_repo(name)
