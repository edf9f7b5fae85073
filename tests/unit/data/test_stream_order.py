"""The order of a stream: a pure function of listing, seed and position, and every row once."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st

import streams
from data.errors import DataError
from data.loader import StepBatches, window_loader, windows_of
from data.order import GROUPS, WHOLE, Mix, random_words, shares_of
from data.reading.access import Access
from data.reading.groups import DataFile, Group, Listing
from data.reading.rows import list_source
from data.split import Split
from data.streaming.windows import epoch_windows, held_out_parts

BLOCK, BATCH = 16, 4
WEIGHTS = (0.7, 0.3)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return streams.parquet_folder(folder / "a", "a"), streams.lines_folder(folder / "b", "b")


def listing_of(sizes: list[int]) -> Listing:
    """A data set of one file with groups of these sizes, ten rows each."""
    file = DataFile("/nowhere", "file", sum(sizes), "1")
    groups = tuple(Group(0, n, 10 * n, 10, 0, 0, size) for n, size in enumerate(sizes))
    return Listing("name", None, "parquet", "text", (file,), groups, "f")


def steps_of(corpus, first=1, count=1):
    """The batches of steps, each with what a snapshot after it stores."""
    windows = windows_of(corpus.train, BLOCK, -100, False)
    order = windows.order(0, BATCH)
    batches = iter(window_loader(windows, StepBatches(order, Split(BATCH), first)))
    return [(next(batches)[0], corpus.train.finish(step)) for step in range(first, first + count)]


def ids_in(corpus, steps, source: int) -> list[str]:
    """The ids of the whole rows of a source, in the order in which they are trained on."""
    chosen = corpus.train.mix.sources(0, BATCH * len(steps)).reshape(-1, BATCH)
    inputs = [
        batch[0][row]
        for (batch, _), of in zip(steps, chosen, strict=True)
        for row in np.flatnonzero(of == source)
    ]
    text = corpus.tokenizer.decode(np.concatenate(inputs))
    return [row.partition(":")[0] for row in text.split("<|endoftext|>")[:-1]]


def held_out_ids(corpus) -> set[str]:
    text = corpus.tokenizer.decode(corpus.held_out.window(0, len(corpus.held_out)))
    return {row.partition(":")[0] for row in text.split("<|endoftext|>")[:-1]}


@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=60), st.integers(1, 400), st.integers(0, 9)
)
@settings(max_examples=100, deadline=None)
def test_the_windows_of_an_epoch_have_each_group_once(sizes, window_bytes, epoch):
    keys = random_words(GROUPS, 1, 0, epoch, 0)
    windows = epoch_windows(listing_of(sizes), np.arange(len(sizes)), keys, window_bytes)
    assert sorted(np.concatenate(windows).tolist()) == list(range(len(sizes)))
    assert all(len(window) for window in windows)
    for window in windows:  # but for its last group, it is not larger than asked
        assert sum(sizes[group] for group in window[:-1]) <= window_bytes


def test_every_row_is_trained_on_once_an_epoch(sources, tmp_path):
    corpus = streams.corpus(tmp_path, *sources, weights=WEIGHTS, held_out_bytes=10**6)
    steps = steps_of(corpus, count=800)
    held_out = held_out_ids(corpus)
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
    corpus = streams.corpus(tmp_path, sources[0])
    steps = steps_of(corpus, count=50)
    inputs = np.concatenate([batch[0].reshape(-1) for batch, _ in steps])
    targets = np.concatenate([batch[1].reshape(-1) for batch, _ in steps])
    assert (inputs[1:] == targets[:-1]).all()  # so no token is left out


def test_a_run_continues_after_any_step_as_if_it_had_not_stopped(sources, tmp_path):
    whole = steps_of(streams.corpus(tmp_path / "1", *sources, weights=WEIGHTS), count=90)
    for step in range(1, 90, 7):
        resumed = streams.corpus(tmp_path / "2", *sources, weights=WEIGHTS)
        resumed.train.begin_at(whole[step - 1][1], step * BATCH)
        for (batch, after), (expected, there) in zip(
            steps_of(resumed, step + 1, 5), whole[step:], strict=False
        ):
            assert batch[0].equal(expected[0])
            assert batch[1].equal(expected[1])
            assert after == there


@pytest.mark.parametrize(("processes", "micro_batches"), [(1, 2), (2, 1), (4, 1), (2, 2)])
def test_processes_and_micro_batches_change_no_step(sources, tmp_path, processes, micro_batches):
    def items(rank: int, parts: int, size: int):
        corpus = streams.corpus(tmp_path, *sources, weights=WEIGHTS)
        order = windows_of(corpus.train, BLOCK, -100, False).order(0, BATCH)
        shard = BatchSamplerShard(
            StepBatches(order, Split(BATCH, parts, BATCH // size), 1), parts, rank, True
        )
        return (
            [[(file.path.name, *span) for file, *span in block] for block in batch]
            for batch in shard
        )

    whole = items(0, 1, BATCH)
    expected = [next(whole) for _ in range(40)]
    shards = [items(rank, processes, BATCH // micro_batches) for rank in range(processes)]
    for step in expected:
        parts = [part for _ in range(micro_batches) for shard in shards for part in next(shard)]
        assert parts == step


def test_the_seed_and_the_number_of_the_source_decide_the_order(sources, tmp_path):
    a, b = sources

    def first_batches(*chosen, **settings):
        weights = (1.0,) * len(chosen)
        corpus = streams.corpus(tmp_path, *chosen, weights=weights, **settings)
        return ids_in(corpus, steps_of(corpus, count=40), source=len(chosen) - 1)

    one = first_batches(a)
    assert one == first_batches(a)
    assert one != first_batches(a, seed=2)
    assert one[:20] != first_batches(b, a)[:20]


def test_the_order_never_changes_between_versions(sources, tmp_path):
    """A resumed run continues the order that it began: these values are a promise."""
    keys = random_words(GROUPS, 1, 0, 5, 0)
    windows = epoch_windows(listing_of([100] * 12), np.arange(12), keys, 300)
    assert [window.tolist() for window in windows] == [[8, 5, 3], [9, 1, 0], [10, 7, 6], [4, 11, 2]]
    mixed = Mix(WEIGHTS, seed=1).sources(10_000_000, 12)
    assert "".join(map(str, mixed)) == "000101100000"
    corpus = streams.corpus(tmp_path, sources[1])
    steps = steps_of(corpus, count=100)
    assert ids_in(corpus, steps, 0)[:6] == ["b30", "b48", "b6", "b15", "b78", "b66"]
    assert held_out_ids(corpus) == {f"b{number}" for number in range(40, 48)}
    cursor = [steps[-1][1][0][key] for key in ("epoch", "window", "row", "token", "blocks")]
    assert cursor == [1, 0, 50, 26, 400]


def test_the_same_rows_are_held_out_whatever_the_seed(sources, tmp_path):
    one, other = (
        streams.corpus(tmp_path / str(seed), *sources, weights=WEIGHTS, seed=seed)
        for seed in (1, 2)
    )
    assert held_out_ids(one) == held_out_ids(other)
    assert len(held_out_ids(one)) > 5


@given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_whole_groups_are_held_out_and_a_part_of_one(sizes, share):
    (parts,) = held_out_parts([listing_of(sizes)], share)
    assert ((parts > 0) & (parts < 1)).sum() <= 1
    assert (parts * sizes).sum() == pytest.approx(share * sum(sizes))


def test_groups_are_held_out_by_the_name_of_their_file():
    listing = listing_of([100] * 200)
    other = replace(listing, files=(replace(listing.files[0], name="other"),))
    elsewhere = replace(listing, files=(replace(listing.files[0], path="/elsewhere"),))
    parts = held_out_parts([listing], 0.1)[0].tolist()
    assert held_out_parts([other], 0.1)[0].tolist() != parts
    assert held_out_parts([elsewhere], 0.1)[0].tolist() == parts


def test_a_source_of_one_group_holds_out_its_first_rows(tmp_path):
    folder = streams.lines_folder(tmp_path / "a", "a", files=1)
    corpus = streams.corpus(tmp_path, folder)
    assert held_out_ids(corpus) == {"a0", "a1", "a2", "a3"}
    trained = {f"a{number}" for number in range(4, 40)}
    assert set(ids_in(corpus, steps_of(corpus, count=60), 0)) == trained


def test_weights_hold_to_a_thousandth_after_100000_blocks():
    for weights in ([0.7, 0.3], [1, 2, 4], [0.0005, 1, 3], [97, 2, 1]):
        mix = Mix(weights, seed=3)
        shares = np.array(mix.counts(100_000)) / 100_000
        assert np.abs(shares - np.array(weights) / sum(weights)).max() <= 0.001
        assert np.bincount(mix.sources(0, 100_000)).tolist() == mix.counts(100_000)
    assert Mix([0.7, 0.3], seed=3).counts(4_800) == [3_360, 1_440]


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=8), st.integers(0, 20_000))
@settings(max_examples=50, deadline=None)
def test_the_counts_before_a_block_need_no_history(weights, block):
    mix = Mix(weights, seed=1)
    assert sum(shares_of(weights)) == WHOLE
    counted = np.bincount(mix.sources(0, block), minlength=len(weights)).tolist()
    assert mix.counts(block) == counted
    late = 10**12 + block  # nothing is counted up to there
    after = np.array(mix.counts(late + 100)) - np.array(mix.counts(late))
    assert Counter(mix.sources(late, 100).tolist()) == Counter(
        {source: count for source, count in enumerate(after.tolist()) if count}
    )


def test_a_snapshot_of_other_weights_or_another_text_is_refused(sources, tmp_path):
    state = steps_of(streams.corpus(tmp_path, *sources, weights=WEIGHTS), count=40)[-1][1]
    with pytest.raises(DataError, match=r"data\.mix: the run has read"):
        streams.corpus(tmp_path, *sources, weights=(0.5, 0.5)).train.begin_at(state, 160)
    for change in ({"row": 10**6}, {"window": 10**6}, {"token": 10**6}):
        corpus = streams.corpus(tmp_path, *sources, weights=WEIGHTS)
        corpus.train.begin_at([state[0] | change, state[1]], 160)
        with pytest.raises(DataError, match=re.escape(f"data.source={sources[0]} has no row")):
            steps_of(corpus, first=41)


def test_a_file_that_two_sources_name_differently_is_held_out_in_both(tmp_path):
    """Its name decides which of its rows are held out, and a held-out data set takes them all."""
    whole = streams.parquet_folder(tmp_path / "data", "a", files=4)
    (tmp_path / "links").mkdir()
    (link := tmp_path / "links/best.parquet").symlink_to(whole / "part-0.parquet")
    one, other, split = (
        list_source(str(one), "text", Access(tmp_path)) for one in (whole, link, link)
    )
    of_one, of_other = held_out_parts([one, other], 0.1)
    shared = [group.file == 0 for group in one.groups]
    assert of_one[shared].tolist() == of_other.tolist()
    assert of_one.sum() < len(shared) / 2
    (alone,) = held_out_parts([one], 0.0, [split])
    assert alone.tolist() == [float(is_shared) for is_shared in shared]


def test_a_text_without_a_text_in_its_column_is_refused_with_the_key(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n' * 20)
    with pytest.raises(DataError, match=r"none of its held-out rows has a text in data\."):
        streams.corpus(tmp_path, tmp_path / "a.jsonl")


def test_a_text_with_only_held_out_rows_is_refused(tmp_path):
    folder = streams.parquet_folder(tmp_path / "a", "a")
    corpus = streams.corpus(tmp_path, folder, val_fraction=1.0)
    with pytest.raises(DataError, match="has no row to train on"):
        steps_of(corpus)
