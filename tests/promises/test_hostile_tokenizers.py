"""Promise 5 with subwords: a snapshot's tokenizer is untrusted input, and refused in a sentence."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from data.subwords import SubwordTokenizer
from data.tokenizer import Tokenizer
from model.gpt import GPT, GPTConfig
from sealed import is_refused, seal
from small_snapshots import state_at
from snapshot.disk.checking import check_snapshot
from snapshot.disk.save import begin_snapshot
from snapshot.errors import SnapshotError
from subword_folders import foreign_folder, trained

STEP = 12


def snapshot_with(tokenizer: Tokenizer, rows: int, root: Path) -> Path:
    torch.manual_seed(0)
    model = GPT(GPTConfig(rows, block_size=4, n_layer=1, n_head=2, n_embd=8))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros((1, 4), dtype=torch.int64)
    model(ids, ids).backward()
    for _ in range(STEP):
        optimizer.step()
    data = {"name": "text", "fingerprint": "0" * 64, "characters": 5, "vocabulary": rows}
    state = state_at(STEP, data)
    return begin_snapshot(root, state, model, optimizer, tokenizer.save).write()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = snapshot_with(trained(), 300, tmp_path_factory.mktemp("base"))
    check_snapshot(folder)
    return folder


@pytest.fixture
def folder(base, tmp_path) -> Path:
    return shutil.copytree(base, tmp_path / base.name)


def changed(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def mutate(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return mutate


def settings(**more: object) -> Callable[[Path], None]:
    return changed("tokenizer_config.json", lambda content: content.update(more))


def content(text: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "tokenizer.json").write_bytes(text)


def added(number: int) -> Callable[[dict], object]:
    token = {
        "id": number,
        "content": "<more>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return lambda content: content["added_tokens"].append(token)


MUTATIONS = {
    "it names code": settings(auto_map={"AutoTokenizer": ["evil--tokenizer.Evil", None]}),
    "it names a class": settings(tokenizer_class="EvilTokenizer"),
    "it names no class": changed("tokenizer_config.json", lambda c: c.pop("tokenizer_class")),
    "it cleans spaces up": settings(clean_up_tokenization_spaces=True),
    "it adds a token": settings(added_tokens_decoder={"300": {"content": "<more>"}}),
    "a special token is none of its own": settings(pad_token="<nowhere>"),
    "a special token is an object": settings(bos_token={"content": "<|endoftext|>"}),
    "the end of text is none of its own": settings(eos_token="<nowhere>"),
    "the end of text is a number": settings(eos_token=0),
    "the end of text is nothing": settings(eos_token=None),
    "the template is a number": settings(chat_template=1),
    "the template is odd": settings(chat_template=[{"name": "a", "template": 1}]),
    "the settings are a list": lambda f: (f / "tokenizer_config.json").write_text("[]"),
    "the map has an entry": changed("special_tokens_map.json", lambda c: c.update(eos_token="a")),
    "a token is beyond the embedding": changed("tokenizer.json", added(300)),
    "a token is far beyond": changed("tokenizer.json", added(2**32 - 1)),
    "the vocabulary is negative": changed(
        "tokenizer.json", lambda c: c["model"]["vocab"].update(a=-1)
    ),
    "a merge of nothing": changed(
        "tokenizer.json", lambda c: c["model"]["merges"].append(["x", "yy"])
    ),
    "another model": changed("tokenizer.json", lambda c: c["model"].update(type="Evil")),
    "no model": changed("tokenizer.json", lambda c: c.pop("model")),
    "no JSON": content(b"\x80\x04pickle"),
    "nothing": content(b""),
    "deep": content(b"[" * 10**6),
    "deep in place": content(b'{"model": ' * 10**5),
    "many values": content(b'{"model": [' + b"0," * 2_400_000 + b"0]}"),
    "too large": content(b'"' + b"a" * (65 << 20) + b'"'),
    "large": content(b'"' + b"a" * (20 << 20) + b'"'),
    "gone": lambda folder: (folder / "tokenizer.json").unlink(),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_tokenizer_that_is_not_ours_is_refused(folder, name):
    MUTATIONS[name](folder)
    seal(folder)

    assert 20 < len(is_refused(folder)) < 1000


@pytest.mark.parametrize("seed", range(40))
def test_any_byte_of_a_tokenizer_may_change(folder, seed):
    """Then it is another tokenizer, or refused in a sentence; the library's panics are no crash."""
    chosen = random.Random(seed)
    path = folder / "tokenizer.json"
    altered = bytearray(path.read_bytes())
    for _ in range(3):
        altered[chosen.randrange(len(altered))] = chosen.choice(b'abc019{}[]",:\\-')
    path.write_bytes(altered)
    seal(folder)
    with suppress(SnapshotError):
        check_snapshot(folder)


def test_a_smaller_vocabulary_than_the_embedding_is_fine(tmp_path):
    check_snapshot(snapshot_with(trained(), 320, tmp_path))


def test_a_larger_one_is_refused(tmp_path):
    folder = snapshot_with(trained(), 299, tmp_path)
    assert "the tokenizer has 300 tokens, not 299" in is_refused(folder)


def test_a_chat_template_stays_in_the_settings(tmp_path):
    foreign = SubwordTokenizer.from_folder(foreign_folder(tmp_path / "theirs"))
    folder = snapshot_with(foreign, 258, tmp_path / "root")

    check_snapshot(folder)
    assert "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())
    assert not (folder / "chat_template.jinja").exists()
