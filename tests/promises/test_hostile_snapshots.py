"""Promises 3 and 5: whatever a snapshot has become, or was made to be, it is refused in a sentence.

Each case is a whole snapshot with one thing wrong and a manifest that fits, so only the content can
give it away. Damage by chance: test_whole_snapshots.py.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import families
from data.tokenizer import CharTokenizer
from model.families import build_model
from model.gpt import GPT, GPTConfig
from sealed import is_refused, seal
from small_snapshots import state_at
from snapshot.disk.checking import check_snapshot
from snapshot.disk.folder import MANIFEST
from snapshot.disk.model import model_config
from snapshot.disk.save import Snapshot
from snapshot.errors import SnapshotError
from subword_folders import trained

STEP = 12
WEIGHTS, MOMENTS = "model.safetensors", "optimizer.safetensors"
JSON_FILES = (MANIFEST, "config.json", "state.json", "tokenizer.json", "tokenizer_config.json")


def good_snapshot(root: Path, model, tokenizer, piece: int = 10**9) -> Path:
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros((1, 4), dtype=torch.int64)
    model(ids, ids).backward()
    for _ in range(STEP):
        optimizer.step()
    state = state_at(STEP)
    state.loss_scaler = torch.amp.GradScaler("cpu").state_dict()
    return Snapshot(root, state, model, optimizer, tokenizer.save, piece_bytes=piece).write()


def tiny_gpt(rows: int, n_layer: int = 1) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(rows, block_size=4, n_layer=n_layer, n_head=2, n_embd=8))


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """Good snapshots: in one file, in pieces, of a transformers model, and with subwords."""
    characters, gpt = CharTokenizer("\n abc"), tiny_gpt(5, n_layer=2)
    llama = build_model(model_config(dict(families.FAMILIES["llama tied"]), "llama"))
    made = {"gpt": (gpt, characters), "pieces": (gpt, characters, 2_000)}
    made |= {"llama": (llama, trained(300)), "subwords": (tiny_gpt(300), trained(300))}
    places = {name: good_snapshot(tmp_path_factory.mktemp(name), *made[name]) for name in made}
    for place in places.values():
        check_snapshot(place)
    assert (places["pieces"] / f"{WEIGHTS}.index.json").exists()
    return places


# What is written in the place of an entry of JSON, or of a safetensors header.

GONE = object()
ODD = (None, -1, 0.5, True, "1", [], {}, 2**70, float("nan"))
SIZES = (GONE, None, -1, 0, 3, 1.0, True, "2", [], 10**6, 2**31, 2**62, 10**30)
CODE = {"AutoModelForCausalLM": "evil--modeling.Evil"}
NAMES = ["/etc/passwd", "..", "", "a/b.json", "x.pkl", "C:\\x.json", "\u0661.json", MANIFEST]
NAMES += ["../{}", "./{}", "{}/", "{}\0", "{}\n", ".{}"]
TOKEN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
TOKEN |= {"content": "<more>", "special": True}

Rows = dict[tuple, Any]
"""By the way to an entry, the values that it may not have. A function is given the old value, and
ANY is some entry of a list or an object."""
ANY = object()
OF_ALL: dict[str, Rows] = {
    MANIFEST: {
        ("format",): ODD,
        ("files",): (*ODD, lambda old: [*old, old[0]], lambda old: [*old, 1], lambda old: old[1:]),
        ("files", ANY, "size"): (*ODD, GONE),
        ("files", ANY, "sha256"): ODD,
        ("files", ANY, "more"): (1,),
        ("files", ANY, "path"): (*ODD, *(partial(str.format, name) for name in NAMES)),
    },
    "config.json": {
        (key,): (CODE,)
        for key in ("auto_map", "_attn_implementation", "quantization_config", "model_type")
    },
}
OF_A_HEADER: Rows = {
    (ANY, "data_offsets"): (
        *(None, [0, 2**63], [-4, 0], lambda old: old[:1], lambda old: [old[1], old[0]]),
        *(lambda old: [old[0], old[1] + 4], lambda old: [old[0], 2**70]),
    ),
    (ANY, "shape"): ([2**31, 2**31, 2**31], [-1, -1], ["1"], lambda old: [*old, 2]),
    (ANY, "dtype"): ("F64", "F16", "I8", "X", None, 4, GONE),
    (ANY,): (None, GONE),
    ("more",): ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},),
    ("empty",): ({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},),
    ("__metadata__",): ([1],),
}
BY_BASE: dict[str, dict[str, Rows]] = {
    "gpt": {
        WEIGHTS: OF_A_HEADER,
        MOMENTS: OF_A_HEADER,
        "config.json": {
            (key,): SIZES for key in ("vocab_size", "n_positions", "n_layer", "n_embd", "n_head")
        },
        "state.json": {
            **{(key,): (GONE, *ODD[:4], []) for key in ("format_version", "run_id", "config")},
            ("step",): (GONE, None, -1, 1.5, True, [], "12", 2, 2**70),
            ("seed",): (-1,),
            ("best_loss",): (float("nan"), 10**400),
            ("loss_scaler", "scale"): (1e300,),
            ("loss_scaler", "growth_factor"): (10**400,),
            ("loss_scaler", "_growth_tracker"): (2**40,),
        },
        "tokenizer.json": {
            ("model",): (GONE, None),
            ("model", "vocab"): (
                *({}, ["a", "b"], lambda old: {key: old[key] for key in old if key != "a"}),
                *(lambda old, a=a: old | {"a": a} for a in (0, 2**40, True, "2")),
                *(lambda old, key=key: old | {key: len(old)} for key in ("z", "ab")),
            ),
        },
    },
    "pieces": {
        f"{WEIGHTS}.index.json": {
            ("weight_map",): (
                *(None, [], {}, "x"),
                lambda old: dict(zip(old, reversed(old.values()), strict=True)),
            ),
            ("weight_map", ANY): (GONE, "../x.safetensors", "/etc/passwd", "none.safetensors", 1),
        },
    },
    "llama": {
        "config.json": {
            (key,): (-1, 0, 1.5, "2", [], {}, 3, 10**6, 2**31, 2**62, 10**30)
            for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        },
    },
    "subwords": {
        "tokenizer_config.json": {
            ("tokenizer_class",): ("EvilTokenizer", GONE),
            ("added_tokens_decoder",): ({"300": {"content": "<more>"}},),
            ("pad_token",): ("<nowhere>",),
            ("eos_token",): ("<nowhere>", 0, None),
            ("chat_template",): (1, [{"name": "a", "template": 1}]),
        },
        "tokenizer.json": {
            ("added_tokens",): (
                lambda old: [*old, {"id": 300, **TOKEN}],
                lambda old: [*old, {"id": 2**32 - 1, **TOKEN}],
            ),
            ("model", "vocab", "a"): (-1,),
            ("model", "merges"): (lambda old: [*old, ["x", "yy"]],),
            ("model", "type"): ("Evil",),
            ("model",): (GONE,),
        },
    },
}


Damage = Callable[[Random, Path], object]
"""Returns False if it has changed nothing."""


def rewrite(file: str, way: tuple, value: Any, rng: Random, folder: Path) -> bool:
    """Change one entry of JSON, or of a safetensors header."""
    path = folder / file
    header, body = read_parts(path) if path.suffix == ".safetensors" else (None, b"")
    content = json.loads(path.read_text()) if header is None else header
    entry, as_it_was, keys = content, repr(content), []
    for key in way:
        entry = content if not keys else entry[keys[-1]]
        keys.append(some_key(rng, entry) if key is ANY else key)
    if value is GONE:
        del entry[keys[-1]]
    else:
        entry[keys[-1]] = value(entry[keys[-1]]) if callable(value) else value
    changed = json.dumps(content)
    path.write_text(changed) if header is None else write_parts(path, changed.encode(), body)
    return repr(content) != as_it_was


def some_key(rng: Random, entries: list | dict) -> Any:
    if isinstance(entries, list):
        return rng.randrange(len(entries))
    return rng.choice(sorted(entries.keys() - {"__metadata__"}))


def read_parts(path: Path) -> tuple[dict, bytes]:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_parts(path: Path, header: bytes, body: bytes, length: int | None = None) -> None:
    length = len(header) if length is None else length
    path.write_bytes(struct.pack("<Q", length % 2**64) + header + body)


# What somebody hostile does to whole files.

FILES = [b"<html>not found</html>", b"version https://git-lfs.github.com/spec/v1\noid", b""]
FILES += [b"\x80\x04pickle", b"\xff\xfe{}", Random(1).randbytes(1000)]
BOMBS = [*FILES, b"[" * 100_000, b'{"a":' * 90_000 + b"1" + b"}" * 90_000, b"9" * 100_000]
BOMBS += [b'"' + b"a" * (65 << 20) + b'"', b"[" + b'{"":0},' * 450_000 + b"0]", b"null", b"[]"]
HEADERS = [b"[]", b"{}", b"{" + b" " * (5 << 20) + b"}", b"[" * 100_000, Random(2).randbytes(100)]
PARTS: list[Callable[[bytes, bytes], tuple]] = [
    *(lambda header, body, other=other: (other, body) for other in HEADERS),
    *(lambda header, body, length=length: (header, body, length) for length in (0, 20, 2**63)),
    lambda header, body: (header, body + b"more"),
    lambda header, body: (header, body[:-4]),
]
"""Another header, or body, or length of the header."""


def replace_file(file: str, content: bytes, rng: Random, folder: Path) -> None:
    (folder / file).write_bytes(content)


def replace_parts(file: str, change: Callable, rng: Random, folder: Path) -> None:
    header, body = read_parts(folder / file)
    write_parts(folder / file, *change(json.dumps(header).encode(), body))


def lose_or_copy_a_piece(rng: Random, folder: Path) -> None:
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    more = folder / f"{path.name.split('.')[0]}x.safetensors"
    rng.choice([path.unlink, lambda: shutil.copy(path, more)])()


def change_a_byte(rng: Random, folder: Path) -> None:
    """Of a header."""
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    content = bytearray(path.read_bytes())
    length = struct.unpack("<Q", content[:8])[0]
    at = rng.choice([at for at in range(8, 8 + length) if content[at] != ord(" ")])
    content[at] = rng.choice([byte for byte in b'abcxyz019{}[]",:' if byte != content[at]])
    path.write_bytes(content)


def damages(base: str) -> Iterator[tuple[str, Damage]]:
    """What is done to a file of a snapshot: each row of the tables, and to whole files."""
    for file, rows in [*BY_BASE[base].items(), *OF_ALL.items()]:
        for way, values in rows.items():
            yield from ((file, partial(rewrite, file, way, value)) for value in values)
    for damage in (change_a_byte, lose_or_copy_a_piece):
        yield from [("a tensor file", damage)] * 20
    for file in JSON_FILES if base == "subwords" else ():
        yield from ((file, partial(replace_file, file, content)) for content in BOMBS)
    for file in (WEIGHTS, MOMENTS) if base == "gpt" else ():
        yield from ((file, partial(replace_file, file, content)) for content in FILES)
        yield from ((file, partial(replace_parts, file, change)) for change in PARTS)


@pytest.mark.parametrize("base", BY_BASE)
def test_every_damaged_or_malicious_snapshot_is_refused(bases, tmp_path, base):
    rng, unchanged = Random(base), 0
    for file, damage in damages(base):
        folder = shutil.copytree(bases[base], tmp_path / bases[base].name)
        if damage(rng, folder) is False:
            unchanged += 1
        else:
            if file != MANIFEST:
                seal(folder)
            sentence = is_refused(folder)
            assert 20 < len(sentence) < 1000, (damage, sentence)
        shutil.rmtree(folder)
    assert unchanged <= 5


def test_any_byte_of_a_tokenizer_may_change(bases, tmp_path):
    """Then it is another tokenizer, or refused in a sentence; the library's panics are no crash."""
    folder = shutil.copytree(bases["llama"], tmp_path / bases["llama"].name)
    path = folder / "tokenizer.json"
    content = path.read_bytes()
    for seed in range(40):
        chosen, altered = Random(seed), bytearray(content)
        for _ in range(3):
            altered[chosen.randrange(len(altered))] = chosen.choice(b'abc019{}[]",:\\-')
        path.write_bytes(altered)
        seal(folder)
        with suppress(SnapshotError):
            check_snapshot(folder)


def test_the_embedding_has_a_row_for_each_token(tmp_path):
    check_snapshot(good_snapshot(tmp_path / "more", tiny_gpt(320), trained()))
    fewer = good_snapshot(tmp_path / "fewer", tiny_gpt(299), trained())
    assert "has 300 tokens, but the embedding of the model has 299 rows" in is_refused(fewer)
