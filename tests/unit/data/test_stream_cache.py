"""The cache of a stream: each window is read once on a machine, ahead of time, in bounded space."""

from __future__ import annotations

import errno
import os
import platform
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

import streams
from data.errors import BrokenText, TextLost
from data.loader import windows_of
from data.reading.groups import DataFile, Group, Listing
from data.streaming.cache import TokenCache
from data.token_file import TokenRows, write_tokens

BATCH = 4
MB = 1_000_000
TOKENS = np.arange(100, dtype=np.uint16)


def write(path: Path) -> None:
    write_tokens(path, [TokenRows(TOKENS, np.array([100]))], TOKENS.dtype)


def files_in(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("[!.]*/tokens.bin"))


def huge(groups: int = 10_000, group_bytes: int = MB) -> Listing:
    """A data set of 10 GB that exists nowhere."""
    file = DataFile("/nowhere", "file", groups * group_bytes, "1")
    all_groups = (Group(0, n, 100 * n, 100, 0, 0, group_bytes) for n in range(groups))
    return Listing("huge", None, "parquet", "text", (file,), tuple(all_groups), "f")


def made_up(read: list[int], listing: Listing, group: Group, **_: object) -> list[str]:
    """The rows of a group, which is noted."""
    read.append(group.index)
    return [f"{group.index}-{row} {'x' * 200}\n" for row in range(100)]


def huge_corpus(folder: Path, read: list[int], listing: Listing | None = None, **settings):
    options = {"val_fraction": 0.1, "window_bytes": 4 * MB, "stream_cache_bytes": 100 * MB}
    options |= {"held_out_bytes": 1000, "seed": 1, "reads_ahead": True, "cache_dir": folder}
    return streams.stream_of([listing or huge()], [1], partial(made_up, read), **options | settings)


def test_the_least_recently_used_is_removed_and_an_open_file_stays_readable(tmp_path):
    write(tmp_path / "size")
    cache = TokenCache(tmp_path, most_bytes=4 * (tmp_path / "size").stat().st_size)
    first = cache.open("a", write)
    for name in ("b", "c", "d", "e"):
        cache.open(name, write)
        assert len(files_in(tmp_path)) <= 4
    assert files_in(tmp_path) == ["b", "c", "d", "e"]
    assert first[0:100].tolist() == TOKENS.tolist()
    cache.open("b", write)  # now it is the newest
    cache.open("f", write)
    assert files_in(tmp_path) == ["b", "d", "e", "f"]


def test_a_file_is_made_once_although_many_need_it(tmp_path):
    cache, made = TokenCache(tmp_path, MB), []
    begin = threading.Barrier(8)

    def need(_: int) -> None:
        begin.wait()
        cache.open("a", lambda path: (made.append(1), write(path)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(need, range(8)))
    assert made == [1]


def test_a_file_that_is_not_whole_is_made_again_and_leftovers_are_removed(tmp_path):
    cache = TokenCache(tmp_path, MB)
    path = cache.open("a", write).path
    path.parent.rename(tmp_path / f".a.{platform.node()}.1.tmp")
    for size in (0, 100):
        cache.open("a", write)
        os.truncate(path, size)
        assert cache.open("a", write)[0:100].tolist() == TOKENS.tolist()
    assert not list(tmp_path.glob("*.tmp"))


def test_a_cache_that_fails_in_a_run_ends_it_in_a_sentence(tmp_path, monkeypatch):
    folder = streams.parquet_folder(tmp_path / "a", "a")
    (source,) = streams.corpus(tmp_path / "cache", folder).train.sources

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("data.streaming.windows.write_tokens", full)
    with pytest.raises(TextLost, match=r"data\.cache_dir=.*cache cannot be used: No space left"):
        source.open((0, 0))


@pytest.mark.parametrize(
    "cursor", [(0, 0, 0, 0, 0), (3, 1500, 7, 0, 4_000_000)], ids=("first", "late")
)
def test_a_start_at_any_step_reads_one_window(tmp_path, cursor):
    read: list[int] = []
    corpus = huge_corpus(tmp_path, read, reads_ahead=False)
    del read[:]  # of the held-out rows
    place = dict(zip(("epoch", "window", "row", "token", "blocks"), cursor, strict=True))
    corpus.train.begin_at([place], place["blocks"])
    windows = windows_of(corpus.train, 16, -100, False)
    windows.__getitems__(windows.order(0, BATCH).items(place["blocks"], 4))
    (source,) = corpus.train.sources
    assert sorted(read) == sorted(source.windows(place["epoch"])[place["window"]])
    assert len(read) == 4


@pytest.mark.parametrize("share", [0.1, 0.01, 0.001])
def test_held_out_rows_cost_little_reading(tmp_path, share):
    """100 KB of them, from groups of 20 KB, in a text of 20,000 groups."""
    read: list[int] = []
    listing = huge(20_000, group_bytes=20_000)
    corpus = huge_corpus(tmp_path, read, listing, val_fraction=share, held_out_bytes=100_000)
    assert corpus.info.held_out_bytes >= 100_000
    assert len(read) == len(set(read)) <= 8


def wait_for_files(folder: Path, count: int) -> None:
    end = time.monotonic() + 20
    while len(files_in(folder)) < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_windows_are_read_ahead_by_one_process(tmp_path):
    read: list[int] = []
    both = [huge_corpus(tmp_path, read, reads_ahead=ahead) for ahead in (True, False)]
    del read[:]
    for corpus in both:
        next(streams.steps_of(corpus, BATCH))
    wait_for_files(tmp_path / "stream", 1 + 5)  # held-out rows, and the windows
    assert max(Counter(read).values()) == 1


def test_a_source_that_hangs_does_not_keep_the_others_from_being_read_ahead(tmp_path):
    folders = [streams.parquet_folder(tmp_path / name, name) for name in ("a", "b")]
    corpus = streams.corpus(tmp_path / "cache", *folders, weights=(1, 1), window_bytes=500)
    hanging, answers = corpus.train.sources[0], threading.Event()
    hanging.open((0, 0))  # the run itself does not have to wait
    hanging.read = lambda *_: answers.wait(60) and []
    corpus.train.order(16, 0, BATCH)
    wait_for_files(tmp_path / "cache/stream", 1 + 1 + 5)
    answers.set()


def test_what_cannot_be_read_is_reported_when_it_is_needed(tmp_path):
    folder = streams.parquet_folder(tmp_path / "a", "a")
    corpus = streams.corpus(tmp_path / "cache", folder, window_bytes=1000)
    steps = streams.steps_of(corpus, BATCH)
    next(steps)

    def read(listing: Listing, group: Group) -> list[str]:
        raise BrokenText("it is broken")

    corpus.train.sources[0].read = read
    with pytest.raises(BrokenText, match="it is broken"):
        list(steps)


@pytest.mark.thorough
def test_memory_is_flat_over_two_thousand_batches(tmp_path):
    corpus = huge_corpus(tmp_path, [])
    steps, used = streams.steps_of(corpus, BATCH, block_size=1024), []
    for number in range(2500):
        next(steps)
        if number % 500 == 499:
            used.append(psutil.Process().memory_info().rss)
    assert psutil.Process().num_fds() < 60
    assert len(files_in(tmp_path / "stream")) > 50
    assert max(used[1:]) - used[0] < 10 * MB, used


def test_what_is_left_out_is_reported_once(tmp_path):
    file, said = streams.lines_folder(tmp_path / "data", "a", files=1) / "part-0.jsonl", []
    file.write_text(file.read_text() + '{"text": 3}\n')
    options = {"held_out_bytes": MB, "window_bytes": MB}
    corpus = streams.corpus(tmp_path / "cache", file, skip_broken=True, say=said.append, **options)
    next(streams.steps_of(corpus, BATCH))
    reason = "data.text_column=text holds int, not text: 3"
    what = f"left out: row 41 of part-0.jsonl ({reason})"
    assert said == [f"warning: data.source={file}: {what}"]
    with pytest.raises(BrokenText, match=r"skip_broken=true leaves out"):  # not from the cache
        streams.corpus(tmp_path / "cache", file, **options)
