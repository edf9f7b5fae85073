"""What `snapshot.resume` names: a path or a repo, and a repo that cannot be asked now."""

from __future__ import annotations

import pytest

from snapshot.errors import SnapshotError
from snapshot.start import choose_start
from store.errors import StoreRefused, StoreUnreachable


def test_a_misspelled_path_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(SnapshotError, match=r"there is no out/python-dcos.*the Hub is not asked"):
        choose_start(tmp_path / "run", "out/python-dcos")


@pytest.mark.parametrize(
    ("fault", "kind"), [(StoreUnreachable, StoreUnreachable), (StoreRefused, SnapshotError)]
)
def test_a_repo_that_cannot_be_reached_is_nobodys_mistake(tmp_path, monkeypatch, fault, kind):
    def read_store(store, revision):
        raise fault("the Hub did not answer in time")

    monkeypatch.setattr("snapshot.source.read_store", read_store)
    monkeypatch.setattr("common.retries.BRIEF_DELAY_SECONDS", 0.0)
    with pytest.raises(kind, match=r"snapshot\.resume=me/other: the Hub did not answer in time\. "):
        choose_start(tmp_path / "run", "me/other")
