"""Sources that are no texts, change while they are read, or take their time."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import tarfile
import threading
import zipfile
from types import SimpleNamespace

import pytest

import data.prepare
import data.progress
import data.reading.text
import training.run.text
from config.schema import Config
from data.columns import TextColumn
from data.corpus import prepare_corpus
from data.errors import DataError
from data.progress import Progress
from data.sources import open_source
from snapshot.start import Start
from training.reporting.console import make_output_lossy, say_error

TEXT = "".join(f"line {i} of the text, é ü 日本\n" for i in range(400))
ROWS = "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(9))


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def prepare(tmp_path):
    def prepare(source, **more):
        settings = {"text_column": "text", "val_fraction": 0.1, "block_size": 8, **more}
        return prepare_corpus(str(source), cache_dir=tmp_path / "cache", **settings)

    return prepare


@pytest.fixture
def complaint(prepare):
    def complaint(source):
        with pytest.raises(DataError) as caught:
            prepare(source)
        return str(caught.value)

    return complaint


# What is no file.


def test_a_device_is_refused_instead_of_read_for_ever(complaint):
    for source in ("/dev/zero", "/dev/zer[o]"):
        sentence = complaint(source)
        assert sentence.startswith(f"data.source={source}: /dev/zero is not a regular file")


@pytest.mark.parametrize("source", ["a.txt", "*.txt"])
def test_a_pipe_is_refused_instead_of_waited_for(complaint, tmp_path, source):
    (tmp_path / "b.txt").write_text(TEXT)
    os.mkfifo(tmp_path / "a.txt")

    assert f"{tmp_path}/a.txt is not a regular file" in complaint(tmp_path / source)


def test_a_link_to_nothing_is_named_and_not_passed_over(complaint, tmp_path):
    (tmp_path / "b.txt").write_text(TEXT)
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")

    assert f"cannot read {tmp_path}/a.txt: No such file" in complaint(tmp_path / "*.txt")


@pytest.mark.parametrize(
    "source",
    [
        "~nobody-has-this-name/x.txt",
        "~nobody-has-this-name/*.txt",
        "x" * 300 + ".txt",
        "x" * 300,
        "/tmp/" + "y/" * 3000 + "*.txt",
        "/dev/null/a.txt",
        "\udcff.txt",
        "[",
        "**",
    ],
)
def test_a_name_that_can_be_no_file_is_told(complaint, tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)

    assert complaint(source).startswith(f"data.source={source}")


def test_a_file_of_the_home_is_found(prepare, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text(TEXT)

    assert prepare("~/a.txt").info.name == "~/a.txt"


# What is no text, and what a name tells.


def archive(kind):
    content = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(content, "w") as opened:
            opened.writestr("a.txt", TEXT)
    else:
        with tarfile.open(fileobj=content, mode="w") as opened:
            entry = tarfile.TarInfo("a.txt")
            entry.size = len(TEXT.encode())
            opened.addfile(entry, io.BytesIO(TEXT.encode()))
    return content.getvalue()


NAMED = "Give it a name that ends in "
CONTENTS = {
    "zip": (archive("zip"), "a ZIP archive. Unpack it first"),
    "tar": (archive("tar"), "NUL bytes for the most part. Unpack it"),
    "tar.gz": (gzip.compress(archive("tar")), "NUL bytes for the most part. Unpack it"),
    "zst.txt": (b"\x28\xb5\x2f\xfd" + bytes(range(99)), f"by Zstandard. {NAMED}.zst"),
    "txt": (gzip.compress(TEXT.encode()), f"compressed by gzip. {NAMED}.gz"),
    "bz2.txt": (bz2.compress(TEXT.encode()), f"compressed by bzip2. {NAMED}.bz2"),
    "xz.txt": (lzma.compress(TEXT.encode()), f"compressed by xz. {NAMED}.xz"),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3", "a PDF document. Convert it"),
    "arrow": (b"ARROW1" + bytes(99), "an Arrow table. Convert it to Parquet"),
    "md": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer. .*git lfs pull"),
    "data": (b"PAR1" + bytes(99), f"a Parquet table. {NAMED}.parquet"),
    "jsonl": (archive("zip"), "a ZIP archive. Unpack it first"),
    "hole": (bytes(5000) + TEXT.encode(), "NUL bytes .* or copy it again"),
    "csv": ("text\na\n".encode("utf-16"), "UTF-16 or UTF-32. Convert it to UTF-8"),
    "1.txt.gz": (gzip.compress(TEXT.encode("utf-32")), "UTF-16 or UTF-32. Convert it"),
    "2.txt": (b"\xfe\xff" + TEXT.encode("utf-16-be"), "UTF-16 or UTF-32. Convert it"),
    "3.txt": (b"\x00\x00\xfe\xff" + TEXT.encode("utf-32-be"), "UTF-16 or UTF-32. Convert it"),
    "4.txt": (TEXT.encode("utf-16-le"), "NUL bytes for the most part"),
    "5.txt": (TEXT.encode("utf-32-be"), "NUL bytes for the most part"),
}


@pytest.mark.parametrize("ending", CONTENTS)
def test_what_is_no_text_is_called_what_it_is(complaint, tmp_path, ending):
    content, what = CONTENTS[ending]
    path = tmp_path / f"a.{ending}"
    path.write_bytes(content)

    sentence = complaint(path)
    assert re.search(rf"data\.source={path}: a\.{ending} is not UTF-8 text, but .*{what}", sentence)


def test_a_text_with_some_nul_characters_is_a_text(prepare, tmp_path):
    (tmp_path / "a.txt").write_text("\0" + TEXT)

    assert prepare(tmp_path / "a.txt").info.characters == len(TEXT) + 1


@pytest.mark.parametrize("name", ["A.TXT", "A.TXT.GZ", "a.txt.Bz2", "A.Md.XZ"])
def test_the_case_of_a_name_does_not_matter_for_texts(prepare, tmp_path, name):
    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    content = pack.get(name.lower().rpartition(".")[2], bytes)(TEXT.encode())
    (tmp_path / name).write_bytes(content)

    assert prepare(tmp_path / name).info.characters == len(TEXT)


@pytest.mark.parametrize(
    "name", ["a.ndjson", "A.JSONL", "A.Json", "A.NDJSON.GZ", "a.ndjson.bz2", "A.CSV", "A.CSV.GZ"]
)
def test_the_case_of_a_name_does_not_matter_for_tables(prepare, tmp_path, name):
    content = ROWS if "JS" in name.upper() else "text\n" + "".join(f"row {i}\n" for i in range(9))
    pack = {"gz": gzip.compress, "bz2": bz2.compress}
    path = tmp_path / name
    path.write_bytes(pack.get(name.lower().rpartition(".")[2], bytes)(content.encode()))
    corpus = prepare(path)

    assert corpus.info.documents == 9
    assert corpus.info.characters == len("row 0\n") * 9


def test_what_a_name_looks_like_does_not_depend_on_its_case(complaint):
    for source in ("missing.JSONL", "missing.ndjson", "missing.TXT.GZ"):
        assert "there is no such file" in complaint(source)


# A text that changes while it is prepared.


def grown(path):
    with open(path, "a") as opened:
        opened.write("more of it\n")


def grown_by_new_characters(path):
    with open(path, "a") as opened:
        opened.write("月火水\n")


def shrunk(path):
    os.truncate(path, path.stat().st_size - 100)


def cut_in_a_character(path):
    os.truncate(path, path.stat().st_size - 2)


def rewritten(path):
    path.write_bytes(TEXT.replace("line", "lime").encode())


def rewritten_alike(path):
    content = path.read_bytes()
    path.write_bytes(content[::-1] if content.isascii() else content)
    os.utime(path, ns=(0, 0))


CHANGES = [grown, grown_by_new_characters, shrunk, cut_in_a_character, rewritten, rewritten_alike]


@pytest.mark.parametrize("after", ["the name is looked up", "the first pass"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_text_that_changes_while_it_is_prepared_is_told(
    complaint, prepare, tmp_path, monkeypatch, change, after
):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode())
    name = "_scan" if after == "the name is looked up" else "_write"
    really = getattr(data.prepare, name)

    def later(*arguments):
        change(path)
        return really(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(data.prepare, name, later)
        assert complaint(path).startswith(f"data.source={path} changed while it was read.")
    assert not [p for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")]

    text = path.read_text(errors="ignore")
    path.write_text(text)
    assert prepare(path).info.characters == len(text)  # when it is at rest


def test_a_text_that_is_gone_while_it_is_prepared_is_told(complaint, tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode())
    really = data.prepare._write

    def later(*arguments):
        path.unlink()
        return really(*arguments)

    monkeypatch.setattr(data.prepare, "_write", later)
    assert f"cannot read {path}: No such file" in complaint(path)


# Lines on the screen.


def test_what_is_quick_is_done_without_a_word(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(data.progress, "FIRST_SECONDS", 600)  # a busy machine is slow
    (tmp_path / "a.txt").write_text(TEXT)
    lines = []
    prepare(tmp_path / "a.txt", say=lines.append)

    assert lines == []
    assert not [thread for thread in threading.enumerate() if "_report" in thread.name]


@pytest.mark.parametrize("pass_name", ["first", "second"])
def test_a_preparation_that_takes_long_says_how_far_it_is(
    prepare, tmp_path, monkeypatch, pass_name
):
    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.setattr(data.progress, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(data.progress, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(data.reading.text, "PIECE_BYTES", 1000)
    said, lines = threading.Event(), []

    def say(line):
        lines.append(line)
        if f"{pass_name} of two passes: " in line:
            said.set()

    really = data.reading.text._decoded
    passes = []

    def decoded(file):
        passes.append(file)
        for number, text in enumerate(really(file)):
            if number == 5 and len(passes) == (1 if pass_name == "first" else 2):
                assert said.wait(timeout=60)
            yield text

    monkeypatch.setattr(data.reading.text, "_decoded", decoded)
    prepare(tmp_path / "a.txt", say=say)

    assert said.is_set()
    assert lines[0].startswith("text      ")
    assert str(tmp_path / "a.txt") in lines[-1]


def test_progress_is_in_percent_where_the_whole_is_known():
    progress = Progress()
    progress.doing("fetching http://x", 400_000_000)
    assert progress.line() == "text      fetching http://x: 0%"
    progress.done = 100_000_000
    assert progress.line() == "text      fetching http://x: 25%"
    progress.doing("fetching http://x")
    assert progress.line() == "text      fetching http://x"
    progress.done = 3_200_000
    assert progress.line() == "text      fetching http://x: 3 MB"
    progress.doing("preparing a.txt, first of two passes", unit="million characters")
    progress.done = 12_000_000
    assert progress.line().endswith("first of two passes: 12 million characters")


def test_a_word_is_said_after_a_second_and_then_every_ten():
    waited, lines = [], []

    class Clock:
        def wait(self, seconds):
            waited.append(seconds)
            return len(waited) > 3

    progress = Progress(lines.append)
    progress._ended = Clock()
    progress.doing("waiting")
    progress._report()

    assert waited == [1, 10, 10, 10]
    assert lines == ["text      waiting"] * 3


@pytest.mark.parametrize("first", [True, False])
def test_one_process_of_each_machine_verifies_and_reports(monkeypatch, first):
    settings = {}

    def prepare_corpus(source, **more):
        settings.update(more)
        return SimpleNamespace(info=SimpleNamespace(fingerprint="1"))

    monkeypatch.setattr(training.run.text, "prepare_corpus", prepare_corpus)
    monkeypatch.setattr(training.run.text, "local_main_first", lambda _, work: work())
    monkeypatch.setattr(training.run.text, "equal_on_all", lambda *_: True)
    process, begun = SimpleNamespace(is_local_main_process=first), Start(None, None, "")
    training.run.text.prepare_text(process, Config(), begun, None)

    assert settings["verify"] is first
    assert (settings["say"] is not None) is first


def test_a_reader_that_is_gone_does_not_stop_a_preparation(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe, open(writing, "w", closefd=False) as gone:
        monkeypatch.setattr("sys.stdout", gone)
        monkeypatch.setattr("sys.stderr", gone)
        with pytest.raises(BrokenPipeError):
            pipe.raw.write(b"text      preparing")
        make_output_lossy()  # as train.py does
        say_error("text      preparing")
        monkeypatch.undo()


# The disk of `datasets`' own cache is not needed for a file.


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_is_prepared_without_the_cache_of_datasets(prepare, tmp_path, monkeypatch, name):
    (tmp_path / "closed").write_text("no folder")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "closed" / "datasets")
    (tmp_path / name).write_text(ROWS)

    assert prepare(tmp_path / name).info.documents == (9 if name == "a.jsonl" else 1)


def test_sources_give_pieces_that_can_be_read_twice(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    source = open_source(str(tmp_path / "a.txt"), TextColumn("text"), tmp_path)

    assert ["".join(piece["text"] for piece in source.read()) for _ in range(2)] == [TEXT, TEXT]
