"""Promises 3 and 5: whatever a snapshot has become, or was made to be, it is refused in a sentence.

Each case is a whole snapshot with one thing wrong. Where somebody hostile would, the manifest is
made to fit: then only the content can give it away.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import families
from data.tokenizer import CharTokenizer
from model.families import build_model
from model.gpt import GPT, GPTConfig
from sealed import MOST_MEMORY, at_most, is_refused, seal
from small_snapshots import state_at
from snapshot.disk.checking import check_snapshot
from snapshot.disk.folder import MANIFEST
from snapshot.disk.model import model_config
from snapshot.disk.save import begin_snapshot
from subword_folders import trained

FEW, ALL = 300, 10_000
SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEP = 12
MANY_TENSORS = json.dumps(
    {str(i): {"dtype": "F32", "shape": [], "data_offsets": [0, 0]} for i in range(30_000)}
).encode()
JSON_FILES = ("config.json", "state.json", "tokenizer.json", "tokenizer_config.json")

Rng = random.Random


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """A good snapshot in one file, and one in pieces."""
    tokenizer = CharTokenizer("\n abc")
    torch.manual_seed(0)
    model = GPT(GPTConfig(tokenizer.vocab_size, block_size=4, n_layer=2, n_head=2, n_embd=8))
    places = {
        name: good_snapshot(tmp_path_factory.mktemp(name), model, tokenizer, piece)
        for name, piece in (("whole", 10**9), ("pieces", 2_000))
    }
    assert (places["pieces"] / "model.safetensors.index.json").exists()
    return places


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A good snapshot of a model of transformers, with a tokenizer of subwords."""
    torch.manual_seed(0)
    model = build_model(model_config(dict(families.FAMILIES["llama tied"]), "llama"))
    return good_snapshot(tmp_path_factory.mktemp("llama"), model, trained(300), 10**9)


def good_snapshot(root: Path, model, tokenizer, piece: int) -> Path:
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros((1, 4), dtype=torch.int64)
    model(ids, ids).backward()
    for _ in range(STEP):
        optimizer.step()
    data = {"name": "text", "fingerprint": "0" * 64, "characters": 5, "vocabulary": 5}
    state = state_at(STEP, data)
    save = tokenizer.save
    place = begin_snapshot(root, state, model, optimizer, save, piece_bytes=piece).write()
    check_snapshot(place)
    return place


def some_file(rng: Rng, folder: Path, pattern: str = "*") -> Path:
    return rng.choice(sorted(folder.glob(pattern)))


# What chance does to a disk: no manifest is mended.


def a_bit_flips(rng: Rng, folder: Path) -> None:
    path = some_file(rng, folder)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def a_file_is_cut(rng: Rng, folder: Path) -> None:
    path = some_file(rng, folder)
    content = path.read_bytes().rstrip()
    path.write_bytes(content[: rng.randrange(len(content))])


def a_file_grows(rng: Rng, folder: Path) -> None:
    with open(some_file(rng, folder), "ab") as opened:
        opened.write(rng.randbytes(rng.randrange(1, 50)) + b"x")


def a_file_is_gone(rng: Rng, folder: Path) -> None:
    some_file(rng, folder).unlink()


def a_file_is_too_much(rng: Rng, folder: Path) -> None:
    names = ("model.bin", "optimizer.pt", "modeling.py", "x.pkl", ".hidden", "a.json", "more")
    (folder / rng.choice(names)).write_bytes(rng.randbytes(9))


def two_files_change_places(rng: Rng, folder: Path) -> None:
    one, other = rng.sample(sorted(folder.iterdir()), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def a_file_is_a_link(rng: Rng, folder: Path) -> None:
    path = some_file(rng, folder)
    aside = folder.parent / f"{folder.name}-aside"
    path.rename(aside)
    path.symlink_to(rng.choice([aside, Path("/etc/passwd"), Path("nowhere")]))


def a_file_is_no_file(rng: Rng, folder: Path) -> None:
    path = some_file(rng, folder)
    path.unlink()
    rng.choice([path.mkdir, lambda: os.mkfifo(path)])()


# What somebody hostile does to names, sizes and JSON.


def a_manifest_leads_elsewhere(rng: Rng, folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    entry = rng.choice(manifest["files"])
    name = entry["path"]
    entry["path"] = rng.choice(
        [
            f"../{folder.name}/{name}",
            "/etc/passwd",
            f"./{name}",
            f"{name}/",
            "..",
            "",
            "a/b.json",
            f"{name}\0",
            "x.pkl",
            "model.bin",
            f"{name}\n",
            "C:\\x.json",
            "\u0661.json",
            "." + name,
            MANIFEST,
            name.upper(),
        ]
    )
    (folder / MANIFEST).write_text(json.dumps(manifest))


def a_manifest_has_another_form(rng: Rng, folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    entry = rng.choice(manifest["files"])
    odd = rng.choice([None, -1, 0.5, True, "1", [], {}, 2**70, float("nan")])
    rng.choice(
        [
            lambda: manifest.update(format=odd),
            lambda: manifest.update(files=odd),
            lambda: entry.update(size=odd),
            lambda: entry.update(sha256=odd),
            lambda: entry.update(path=odd),
            lambda: entry.update(more=odd),
            lambda: entry.pop("size"),
            lambda: manifest["files"].append(dict(entry)),
            lambda: manifest["files"].remove(entry),
            lambda: manifest["files"].append(odd),
        ]
    )()
    (folder / MANIFEST).write_text(json.dumps(manifest))


def json_is_a_bomb(rng: Rng, folder: Path) -> None:
    names = [MANIFEST, *JSON_FILES]
    deep = rng.randrange(2_000, 200_000)
    bomb = rng.choice(
        [
            lambda: b"[" * deep,
            lambda: b"[" * deep + b"]" * deep,
            lambda: b'{"a":' * deep + b"1" + b"}" * deep,
            lambda: b"[" + b"{}," * 500_000 + b"{}]",
            lambda: b"[" + b'{"":0},' * 450_000 + b"0]",
            lambda: b'"' + b"a" * (17 << 20) + b'"',
            lambda: b"9" * 100_000,
            lambda: rng.randbytes(1000),
            lambda: b"\xff\xfe" + b"{}",
            lambda: b"",
        ]
    )()
    name = rng.choice(names)
    (folder / name).write_bytes(bomb)
    if name != MANIFEST:
        seal(folder)


def a_json_value_is_odd(rng: Rng, folder: Path) -> None:
    name = rng.choice(["config.json", "state.json"])
    content = json.loads((folder / name).read_text())
    if name == "config.json":
        key = rng.choice(["vocab_size", "n_positions", "n_layer", "n_embd", "n_head", "model_type"])
        odd = [None, -1, 0, 3, 1.0, True, "2", [], 10**6, 2**31, 2**62, 10**30]
    else:
        key = rng.choice(["format_version", "run_id", "step", "epoch", "config", "data", "seed"])
        odd = [None, -1, 1.5, True, [], 2**70]
    content[key] = rng.choice(odd)
    (folder / name).write_text(json.dumps(content))
    seal(folder)


def a_json_key_is_gone(rng: Rng, folder: Path) -> None:
    name, keys = rng.choice(
        [
            ("config.json", ["vocab_size", "n_positions", "n_layer", "n_embd", "n_head"]),
            ("state.json", ["format_version", "run_id", "attempt_id", "step", "config", "data"]),
            ("tokenizer.json", ["model"]),
        ]
    )
    content = json.loads((folder / name).read_text())
    del content[rng.choice(keys)]
    (folder / name).write_text(json.dumps(content))
    seal(folder)


def a_config_asks_for_code(rng: Rng, folder: Path) -> None:
    name = rng.choice(["config.json", "tokenizer_config.json", "special_tokens_map.json"])
    content = json.loads((folder / name).read_text())
    key = rng.choice(["auto_map", "custom_pipelines", "quantization_config", "trust_remote_code"])
    content[key] = {"AutoModelForCausalLM": "evil--modeling.Evil"}
    (folder / name).write_text(json.dumps(content))
    seal(folder)


def a_vocabulary_is_another(rng: Rng, folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    rng.choice(
        [
            lambda: vocabulary.update(z=len(vocabulary)),
            lambda: vocabulary.update(a=0),
            lambda: vocabulary.update(a=2**40),
            lambda: vocabulary.update(a=True),
            lambda: vocabulary.update(a="2"),
            lambda: vocabulary.update(ab=len(vocabulary)),
            lambda: vocabulary.pop("a"),
            lambda: vocabulary.clear(),
            lambda: content["model"].update(vocab=["a", "b"]),
            lambda: content.update(model=None),
        ]
    )()
    path.write_text(json.dumps(content))
    seal(folder)


# What somebody hostile does to safetensors files.


def read_parts(path: Path) -> tuple[dict, bytes]:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_parts(path: Path, header: bytes, body: bytes, length: int | None = None) -> None:
    length = len(header) if length is None else length
    path.write_bytes(struct.pack("<Q", length % 2**64) + header + body)


def a_header_lies(rng: Rng, folder: Path) -> None:
    path = some_file(rng, folder, "*.safetensors")
    header, body = read_parts(path)
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice(names)
    entry = header[name]
    begin, end = entry["data_offsets"]
    rng.choice(
        [
            lambda: entry.update(data_offsets=[begin, end + 4]),
            lambda: entry.update(data_offsets=[begin + 4, end + 4]),
            lambda: entry.update(data_offsets=[end, begin]),
            lambda: entry.update(data_offsets=[-4, end]),
            lambda: entry.update(data_offsets=[0, 2**63]),
            lambda: entry.update(data_offsets=[begin, 2**70]),
            lambda: entry.update(data_offsets=[float(begin), end]),
            lambda: entry.update(data_offsets=[begin]),
            lambda: entry.update(data_offsets=None),
            lambda: entry.update(shape=[*entry["shape"], 2]),
            lambda: entry.update(shape=[2**31, 2**31, 2**31]),
            lambda: entry.update(shape=[-1, -1]),
            lambda: entry.update(shape=["1"]),
            lambda: entry.update(dtype=rng.choice(["F64", "F16", "I8", "BOOL", "X", None, 4])),
            lambda: entry.pop("dtype"),
            lambda: header.update({name: None}),
            lambda: header.update({f"{name}.more": dict(entry)}),
            lambda: header.update({"empty": {**entry, "shape": [0], "data_offsets": [0, 0]}}),
            lambda: header.update({"__metadata__": {"format": "pt", "x": "y" * 1000}}),
            lambda: header.update({"__metadata__": [1]}),
            lambda: header.pop(name),
            lambda: header.update({name + "x": header.pop(name)}),
        ]
    )()
    write_parts(path, json.dumps(header).encode(), body)
    seal(folder)


def a_header_is_none(rng: Rng, folder: Path) -> None:
    path = some_file(rng, folder, "*.safetensors")
    header, body = read_parts(path)
    encoded = json.dumps(header).encode()
    rng.choice(
        [
            lambda: write_parts(path, encoded, body, rng.randrange(2**64)),
            lambda: write_parts(path, encoded, body, len(encoded) - 1),
            lambda: write_parts(path, encoded, body, 0),
            lambda: write_parts(path, b"[]", body),
            lambda: write_parts(path, b"{}", body),
            lambda: write_parts(path, b"{" + b" " * (5 << 20) + b"}", body),
            lambda: write_parts(path, MANY_TENSORS, b""),
            lambda: write_parts(path, b"[" * 100_000, body),
            lambda: write_parts(path, rng.randbytes(100), body),
            lambda: write_parts(path, encoded, body + b"more"),
            lambda: write_parts(path, encoded, body[:-4]),
            lambda: path.write_bytes(b"<html>not found</html>"),
            lambda: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0"),
            lambda: path.write_bytes(b""),
            lambda: path.write_bytes(rng.randbytes(rng.randrange(1, 3000))),
        ]
    )()
    seal(folder)


def a_header_byte_is_another(rng: Rng, folder: Path) -> None:
    path = some_file(rng, folder, "*.safetensors")
    content = bytearray(path.read_bytes())
    length = struct.unpack("<Q", content[:8])[0]
    places = [at for at in range(8, 8 + length) if content[at] != ord(" ")]
    at = rng.choice(places)
    content[at] = rng.choice([byte for byte in b'abcxyz019{}[]",:' if byte != content[at]])
    path.write_bytes(content)
    seal(folder)


def an_index_lies(rng: Rng, folder: Path) -> None:
    path = some_file(rng, folder, "*.index.json")
    content = json.loads(path.read_text())
    names = content["weight_map"]
    name = rng.choice(sorted(names))
    others = sorted(set(names.values()) - {names[name]})
    rng.choice(
        [
            lambda: names.update({name: "../x.safetensors"}),
            lambda: names.update({name: "/etc/passwd"}),
            lambda: names.update({name: "none.safetensors"}),
            lambda: names.update({name: rng.choice([None, 1, [], {}])}),
            lambda: names.update({name: rng.choice(others)}),
            lambda: names.pop(name),
            lambda: content.update(weight_map=rng.choice([None, [], {}, "x"])),
            lambda: path.unlink(),
            lambda: (folder / names[name]).unlink(),
            lambda: shutil.copy(
                folder / names[name], folder / f"{path.name.split('.')[0]}x.safetensors"
            ),
        ]
    )()
    if path.exists():
        path.write_text(json.dumps(content))
    seal(folder)


MUTATIONS: list[Callable[[Rng, Path], None]] = [
    a_bit_flips,
    a_file_is_cut,
    a_file_grows,
    a_file_is_gone,
    a_file_is_too_much,
    two_files_change_places,
    a_file_is_a_link,
    a_file_is_no_file,
    a_manifest_leads_elsewhere,
    a_manifest_has_another_form,
    json_is_a_bomb,
    a_json_value_is_odd,
    a_json_key_is_gone,
    a_config_asks_for_code,
    a_vocabulary_is_another,
    a_header_lies,
    a_header_is_none,
    a_header_byte_is_another,
    an_index_lies,
]


def test_memory_that_is_taken_and_given_back_is_noticed():
    taken = json.dumps([0] * 10_000_000)
    with pytest.raises(AssertionError), at_most(MOST_MEMORY // 4):
        json.loads(taken)
    with at_most(MOST_MEMORY // 4):
        json.loads(taken[: len(taken) // 100].rpartition(",")[0] + "]")


@pytest.mark.parametrize(
    "numbers",
    [
        range(FEW),
        pytest.param(range(FEW, ALL), marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
    ids=["few", "all"],
)
def test_every_damaged_or_malicious_snapshot_is_refused(bases, tmp_path, numbers):
    sentences, unchanged = set(), 0
    for number in numbers:
        rng = random.Random(number)
        mutate = MUTATIONS[number % len(MUTATIONS)]
        base = "pieces" if mutate is an_index_lies else rng.choice(sorted(bases))
        folder = tmp_path / bases[base].name
        shutil.copytree(bases[base], folder)
        mutate(rng, folder)
        if is_unchanged(folder, bases[base]):
            unchanged += 1
        else:
            sentence = is_refused(folder)
            sentences.add(sentence.replace(str(folder), "..."))
            assert 20 < len(sentence) < 1000, (number, sentence)
        remove(folder)
    assert unchanged < len(numbers) / 100
    refused = len(numbers) - unchanged
    print(f"{refused} snapshots refused in {len(sentences)} different sentences")


def a_size_is_odd(rng: Rng, folder: Path) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    keys = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    key = rng.choice([*keys, "num_key_value_heads", "head_dim", "vocab_size", "model_type"])
    content[key] = rng.choice([-1, 0, 1.5, "2", [], {}, 3, 10**6, 2**31, 2**62, 10**30])
    path.write_text(json.dumps(content))
    seal(folder)


GPT2_ALONE = (a_json_value_is_odd, a_json_key_is_gone, a_vocabulary_is_another, an_index_lies)
OF_ANY_MODEL = [one for one in MUTATIONS if one not in GPT2_ALONE] + [a_size_is_odd]


@pytest.mark.parametrize(
    "numbers", [range(80), pytest.param(range(80, 3_000), marks=SLOW)], ids=["few", "all"]
)
def test_every_damaged_snapshot_of_another_model_is_refused(llama, tmp_path, numbers):
    for number in numbers:
        rng = random.Random(number)
        folder = tmp_path / llama.name
        shutil.copytree(llama, folder)
        OF_ANY_MODEL[number % len(OF_ANY_MODEL)](rng, folder)
        if not is_unchanged(folder, llama):
            assert 20 < len(is_refused(folder)) < 1000, number
        remove(folder)


def is_unchanged(folder: Path, base: Path) -> bool:
    """Whether the change came out as nothing: a 3 in the place of a 3."""
    if {path.name for path in folder.iterdir()} != {path.name for path in base.iterdir()}:
        return False
    return all(is_same(path, base / path.name) for path in folder.iterdir())


def is_same(path: Path, other: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    content, before = path.read_bytes(), other.read_bytes()
    if content == before or path.suffix != ".json" or len(content) > 2 * len(before):
        return content == before
    try:
        return repr(json.loads(content)) == repr(json.loads(before))
    except (ValueError, RecursionError):
        return False


def remove(folder: Path) -> None:
    shutil.rmtree(folder)
    (folder.parent / f"{folder.name}-aside").unlink(missing_ok=True)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from([MANIFEST, *JSON_FILES, "special_tokens_map.json"]), content=VALUES)
def test_any_json_in_the_place_of_a_file_is_refused(bases, tmp_path_factory, name, content):
    assume(not (name.startswith(("tokenizer_config", "special")) and content == {}))
    folder = tmp_path_factory.mktemp("any") / bases["whole"].name
    shutil.copytree(bases["whole"], folder)
    (folder / name).write_text(json.dumps(content))
    if name != MANIFEST:
        seal(folder)
    assert is_refused(folder)
    remove(folder)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(header=st.binary(max_size=300), body=st.binary(max_size=50))
def test_any_bytes_in_the_place_of_weights_are_refused(bases, tmp_path_factory, header, body):
    folder = tmp_path_factory.mktemp("bytes") / bases["whole"].name
    shutil.copytree(bases["whole"], folder)
    write_parts(folder / "model.safetensors", header, body)
    seal(folder)
    assert is_refused(folder)
    remove(folder)
