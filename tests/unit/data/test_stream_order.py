"""The order of a stream: a pure function of listing, seed and position, and every row once."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streams
from config.schema import DataConfig
from data.errors import DataError
from data.order import WHOLE, Mix, shares_of
from data.reading.access import Access
from data.reading.groups import DataFile, Group, Listing
from data.reading.rows import list_source
from data.streaming.windows import StreamSource, held_out_parts
from streams import held_out_ids

BLOCK, BATCH = 16, 4
WEIGHTS = (0.7, 0.3)
SIZES = st.lists(st.integers(0, 500), min_size=1, max_size=60)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return streams.parquet_folder(folder / "a", "a"), streams.lines_folder(folder / "b", "b")


@pytest.fixture
def mixed(sources, tmp_path):
    """Opens the stream of both sources, with one cache for a test."""
    return lambda **changes: streams.corpus(tmp_path, *sources, **{"weights": WEIGHTS} | changes)


def listing_of(sizes: list[int]) -> Listing:
    """A data set of one file with groups of these sizes, ten rows each."""
    file = DataFile("/nowhere", "file", sum(sizes), "1")
    groups = tuple(Group(0, n, 10 * n, 10, 0, 0, size) for n, size in enumerate(sizes))
    return Listing("name", None, "parquet", "text", (file,), groups, "f")


def windows_of_epoch(sizes: list[int], window_bytes: int, epoch: int) -> list[list[int]]:
    data, nothing = DataConfig(window_bytes=window_bytes), np.zeros(len(sizes))
    source = StreamSource(listing_of(sizes), 0, nothing, data, None, 1, None, None)
    return [window.tolist() for window in source.windows(epoch)]


def steps_of(corpus, first=1, count=1):
    return list(islice(streams.steps_of(corpus, BATCH, first, BLOCK), count))


def ids_in(corpus, steps, source: int) -> list[str]:
    """The ids of the whole rows of a source, in the order in which they are trained on."""
    chosen = corpus.train.mix.sources(0, BATCH * len(steps)) == source
    return streams.ids_in(corpus, np.concatenate([batch[0] for batch, _ in steps])[chosen].ravel())


@given(SIZES, st.integers(1, 400), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_the_windows_of_an_epoch_have_each_group_once(sizes, window_bytes, epoch):
    windows = windows_of_epoch(sizes, window_bytes, epoch)
    assert sorted(chain.from_iterable(windows)) == list(range(len(sizes)))
    assert all(windows)
    for window in windows:  # but for its last group, it is not larger than asked
        assert sum(sizes[group] for group in window[:-1]) <= window_bytes


def test_every_row_is_trained_on_once_an_epoch(mixed):
    corpus = mixed(held_out_bytes=10**6)
    steps, held_out = steps_of(corpus, count=800), set(held_out_ids(corpus))
    for source, (name, rows) in enumerate((("a", 120), ("b", 80))):
        everything = {f"{name}{number}" for number in range(rows)}
        trained = everything - held_out
        assert 0 < len(everything & held_out) < rows / 4
        ids = ids_in(corpus, steps, source)
        epochs = [ids[first : first + len(trained)] for first in range(0, len(ids), len(trained))]
        assert len(epochs) > 3
        for epoch in epochs[:-1]:
            assert sorted(epoch) == sorted(trained)
        assert set(epochs[-1]) <= trained
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)  # each in another order


def test_the_last_target_of_a_block_is_the_next_one_s_first(sources, tmp_path):
    batches = [batch for batch, _ in steps_of(streams.corpus(tmp_path, sources[0]), count=50)]
    inputs, targets = (np.concatenate(part).ravel() for part in zip(*batches, strict=True))
    assert (inputs[1:] == targets[:-1]).all()  # so no token is left out


def test_a_run_continues_after_any_step_as_if_it_had_not_stopped(mixed):
    whole = steps_of(mixed(), count=90)
    for step in range(1, 90, 7):
        resumed = mixed()
        resumed.train.begin_at(whole[step - 1][1], step * BATCH)
        expected = whole[step : step + 5]
        for (batch, after), (its_batch, there) in zip(
            steps_of(resumed, step + 1, len(expected)), expected, strict=True
        ):
            assert batch[0].equal(its_batch[0])
            assert batch[1].equal(its_batch[1])
            assert after == there


def test_the_seed_and_the_number_of_a_source_decide_the_order_but_not_what_is_held_out(
    sources, tmp_path
):
    def read(*chosen, **settings):
        weights = (1.0,) * len(chosen)
        corpus = streams.corpus(tmp_path, *chosen, weights=weights, **settings)
        return ids_in(corpus, steps_of(corpus, count=40), len(chosen) - 1), held_out_ids(corpus)

    a, b = sources
    once, again, other = read(a), read(a), read(a, seed=2)
    assert once == again
    assert once[0] != other[0]
    assert once[1] == other[1]
    assert len(once[1]) > 5
    assert once[0][:20] != read(b, a)[0][:20]


def test_the_order_never_changes_between_versions(sources, tmp_path):
    """A resumed run continues the order that it began: these values are a promise."""
    windows = windows_of_epoch([100] * 12, 300, epoch=5)
    assert windows == [[8, 5, 3], [9, 1, 0], [10, 7, 6], [4, 11, 2]]
    assert "".join(map(str, Mix(WEIGHTS, seed=1).sources(10_000_000, 12))) == "000101100000"
    corpus = streams.corpus(tmp_path, sources[1])
    steps = steps_of(corpus, count=100)
    assert ids_in(corpus, steps, 0)[:6] == ["b30", "b48", "b6", "b15", "b78", "b66"]
    assert sorted(held_out_ids(corpus)) == [f"b{number}" for number in range(40, 48)]
    cursor = [steps[-1][1][0][key] for key in ("epoch", "window", "row", "token", "blocks")]
    assert cursor == [1, 0, 50, 26, 400]


@given(SIZES, st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_whole_groups_are_held_out_and_a_part_of_one(sizes, share):
    (parts,) = held_out_parts([listing_of(sizes)], share)
    assert ((parts > 0) & (parts < 1)).sum() <= 1
    assert (parts * sizes).sum() == pytest.approx(share * sum(sizes))


def test_groups_are_held_out_by_the_name_of_their_file():
    listing = listing_of([100] * 200)
    parts, moved, renamed = (
        held_out_parts([replace(listing, files=(replace(listing.files[0], **change),))], 0.1)[0]
        for change in ({}, {"path": "/elsewhere"}, {"name": "other"})
    )
    assert parts.tolist() == moved.tolist() != renamed.tolist()


def test_a_source_of_one_group_holds_out_its_first_rows(tmp_path):
    corpus = streams.corpus(tmp_path, streams.lines_folder(tmp_path / "a", "a", files=1))
    assert held_out_ids(corpus) == ["a0", "a1", "a2", "a3"]
    trained = {f"a{number}" for number in range(4, 40)}
    assert set(ids_in(corpus, steps_of(corpus, count=60), 0)) == trained


def test_a_held_out_data_set_takes_no_training_row(sources, tmp_path):
    held_out = [list_source(str(sources[1]), "text", Access(tmp_path))]
    corpus = streams.corpus(tmp_path, sources[0], held_out=held_out, held_out_bytes=10**6)
    assert sorted(held_out_ids(corpus)) == sorted(f"b{number}" for number in range(80))
    trained = set(ids_in(corpus, steps_of(corpus, count=160), 0))
    assert trained == {f"a{number}" for number in range(120)}
    assert corpus.info.fingerprint != streams.corpus(tmp_path, sources[0]).info.fingerprint


def test_weights_hold_to_a_thousandth_after_100000_blocks():
    for weights in ([0.7, 0.3], [1, 2, 4], [0.0005, 1, 3], [97, 2, 1]):
        shares = np.array(Mix(weights, seed=3).counts(100_000)) / 100_000
        assert np.abs(shares - np.array(weights) / sum(weights)).max() <= 0.001
    assert Mix([0.7, 0.3], seed=3).counts(4_800) == [3_360, 1_440]


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=8), st.integers(0, 20_000))
@settings(max_examples=50, deadline=None)
def test_the_counts_before_a_block_need_no_history(weights, block):
    mix = Mix(weights, seed=1)
    assert sum(shares_of(weights)) == WHOLE
    assert mix.counts(block) == np.bincount(mix.sources(0, block), minlength=len(weights)).tolist()
    late = 10**12 + block  # nothing is counted up to there
    after = np.array(mix.counts(late + 100)) - np.array(mix.counts(late))
    begun = Counter(mix.sources(late, 100).tolist())
    assert [begun[source] for source in range(len(weights))] == after.tolist()


def test_a_snapshot_of_other_weights_or_another_text_is_refused(mixed, sources):
    state = steps_of(mixed(), count=40)[-1][1]
    for corpus, blocks in ((mixed(weights=(0.5, 0.5)), 160), (mixed(), 164)):
        with pytest.raises(DataError, match=r"data\.mix: the run has read \[113, 47\] blocks"):
            corpus.train.begin_at(state, blocks)
    for change in ({"row": 10**6}, {"window": 10**6}, {"token": 10**6}):
        corpus = mixed()
        corpus.train.begin_at([state[0] | change, state[1]], 160)
        with pytest.raises(DataError, match=re.escape(f"data.source={sources[0]} has no row")):
            steps_of(corpus, first=41)


def test_a_file_that_two_sources_name_differently_is_held_out_in_both(tmp_path):
    """Its name decides which of its rows are held out, and a held-out data set takes them all."""
    whole = streams.parquet_folder(tmp_path / "data", "a", files=4)
    (tmp_path / "links").mkdir()
    (link := tmp_path / "links/best.parquet").symlink_to(whole / "part-0.parquet")
    one, other = (list_source(str(path), "text", Access(tmp_path)) for path in (whole, link))
    of_one, of_other = held_out_parts([one, other], 0.1)
    shared = [group.file == 0 for group in one.groups]
    assert of_one[shared].tolist() == of_other.tolist()
    assert of_one.sum() < len(shared) / 2
    (alone,) = held_out_parts([one], 0.0, [other])
    assert alone.tolist() == [float(is_shared) for is_shared in shared]


def test_a_stream_without_rows_to_evaluate_or_to_train_on_is_refused(sources, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n' * 20)
    with pytest.raises(DataError, match=r"none of its held-out rows has a text in data\."):
        streams.corpus(tmp_path, tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="has no row to train on"):
        steps_of(streams.corpus(tmp_path, sources[0], val_fraction=1.0))
