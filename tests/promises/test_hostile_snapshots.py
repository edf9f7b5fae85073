"""Promises 3 and 5: whatever a snapshot has become, or was made to be, it is refused in a sentence.

Each case is a whole snapshot with one thing wrong and a manifest that fits, so only the content can
give it away. Damage by chance: test_whole_snapshots.py.
"""

from __future__ import annotations

import json
import random
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

FEW, ALL = 150, 10_000
STEP = 12
SCALER = torch.amp.GradScaler("cpu").state_dict()
WEIGHTS = "model.safetensors"
JSON_FILES = ("config.json", "state.json", "tokenizer.json", "tokenizer_config.json")


def good_snapshot(root: Path, model, tokenizer, piece: int = 10**9) -> Path:
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros((1, 4), dtype=torch.int64)
    model(ids, ids).backward()
    for _ in range(STEP):
        optimizer.step()
    data = {"name": "text", "fingerprint": "0" * 64, "characters": 5, "vocabulary": 5}
    state = state_at(STEP, data)
    state.loss_scaler = SCALER
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
        "optimizer.safetensors": OF_A_HEADER,
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


def rewrite(file: str, way: tuple, value: Any, rng: Random, folder: Path) -> bool:
    """Change one entry, and make the manifest fit. False if the value was there already."""
    path = folder / file
    header, body = read_parts(path) if path.suffix == ".safetensors" else (None, b"")
    content = json.loads(path.read_text()) if header is None else header
    entry, as_it_was = content, repr(content)
    *before, last = [key if key is not ANY else None for key in way]
    for key in before:
        entry = entry[some_key(rng, entry) if key is None else key]
    last = some_key(rng, entry) if last is None else last
    if value is GONE:
        del entry[last]
    else:
        entry[last] = value(entry[last]) if callable(value) else value
    if repr(content) == as_it_was:
        return False
    changed = json.dumps(content)
    if header is None:
        path.write_text(changed)
    else:
        write_parts(path, changed.encode(), body)
    if file != MANIFEST:
        seal(folder)
    return True


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


def some_file(rng: Random, folder: Path, pattern: str) -> Path:
    return rng.choice(sorted(folder.glob(pattern)))


def a_piece_is_gone_or_too_much(rng: Random, folder: Path) -> None:
    path = some_file(rng, folder, "*.safetensors")
    more = folder / f"{path.name.split('.')[0]}x.safetensors"
    rng.choice([path.unlink, lambda: shutil.copy(path, more)])()
    seal(folder)


def json_is_a_bomb(rng: Random, folder: Path) -> None:
    deep = rng.randrange(2_000, 200_000)
    bombs = [b"[" * deep, b'{"a":' * deep + b"1" + b"}" * deep, b'"' + b"a" * (65 << 20) + b'"']
    bombs += [b"[" + b'{"":0},' * 450_000 + b"0]", b"9" * 100_000, b"null", b"[]", b""]
    bombs += [rng.randbytes(1000), b"\xff\xfe{}", b"\x80\x04pickle"]
    name = rng.choice([MANIFEST, *JSON_FILES])
    (folder / name).write_bytes(rng.choice(bombs))
    if name != MANIFEST:
        seal(folder)


def a_header_is_none(rng: Random, folder: Path) -> None:
    path = some_file(rng, folder, "*.safetensors")
    header, body = read_parts(path)
    encoded = json.dumps(header).encode()
    headers = [b"[]", b"{}", b"{" + b" " * (5 << 20) + b"}", b"[" * 100_000, rng.randbytes(100)]
    files = [b"<html>not found</html>", b"version https://git-lfs.github.com/spec/v1\noid", b""]
    rng.choice(
        [
            lambda: write_parts(path, rng.choice(headers), body),
            lambda: write_parts(path, encoded, body, rng.choice([0, len(encoded) - 1, 2**63])),
            lambda: write_parts(path, encoded, rng.choice([body + b"more", body[:-4]])),
            lambda: path.write_bytes(rng.choice([*files, rng.randbytes(1000)])),
        ]
    )()
    seal(folder)


def a_header_byte_is_another(rng: Random, folder: Path) -> None:
    path = some_file(rng, folder, "*.safetensors")
    content = bytearray(path.read_bytes())
    length = struct.unpack("<Q", content[:8])[0]
    at = rng.choice([at for at in range(8, 8 + length) if content[at] != ord(" ")])
    content[at] = rng.choice([byte for byte in b'abcxyz019{}[]",:' if byte != content[at]])
    path.write_bytes(content)
    seal(folder)


CHANCE: list[Callable[[Random, Path], object]] = [
    a_piece_is_gone_or_too_much,
    json_is_a_bomb,
    a_header_is_none,
    a_header_byte_is_another,
]


def listed() -> Iterator[tuple[str, Callable[[Random, Path], object]]]:
    """Each value of the tables above, with the snapshot that gets it."""
    tables = [*BY_BASE.items(), *((base, OF_ALL) for base in ("pieces", "subwords"))]
    for base, files in tables:
        for file, rows in files.items():
            for way, values in rows.items():
                for value in values:
                    yield base, partial(rewrite, file, way, value)


def numbered(number: int) -> tuple[str, Callable[[Random, Path], object]]:
    """A case of the tables while there are some, then one by chance."""
    if number < len(LISTED):
        return LISTED[number]
    return Random(-number).choice(sorted(BY_BASE)), CHANCE[number % len(CHANCE)]


LISTED = list(listed())


@pytest.mark.parametrize(
    "numbers",
    [
        range(len(LISTED) + FEW),
        pytest.param(
            range(len(LISTED) + FEW, ALL), marks=[pytest.mark.slow, pytest.mark.timeout(1800)]
        ),
    ],
    ids=["few", "all"],
)
def test_every_damaged_or_malicious_snapshot_is_refused(bases, tmp_path, numbers):
    sentences, unchanged = set(), 0
    for number in numbers:
        base, mutate = numbered(number)
        folder = shutil.copytree(bases[base], tmp_path / bases[base].name)
        if mutate(Random(number), folder) is False:
            unchanged += 1
        else:
            sentence = is_refused(folder)
            sentences.add(sentence.replace(str(folder), "..."))
            assert 20 < len(sentence) < 1000, (number, mutate, sentence)
        shutil.rmtree(folder)
        (tmp_path / "aside").unlink(missing_ok=True)
    assert unchanged < len(numbers) / 50
    refused = len(numbers) - unchanged
    print(f"{refused} snapshots refused in {len(sentences)} different sentences")


def test_any_byte_of_a_tokenizer_may_change(bases, tmp_path):
    """Then it is another tokenizer, or refused in a sentence; the library's panics are no crash."""
    folder = shutil.copytree(bases["llama"], tmp_path / bases["llama"].name)
    path = folder / "tokenizer.json"
    content = path.read_bytes()
    for seed in range(40):
        chosen, altered = random.Random(seed), bytearray(content)
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
