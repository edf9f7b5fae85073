"""Snapshots in pieces, their writing and pruning, and what a restore needs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from config.schema import OptimConfig
from model.gpt import GPT
from small_snapshots import SHAPE, trained, write
from snapshot.disk.folder import remove_leftovers, snapshot_folders, verify
from snapshot.disk.load import restore
from snapshot.disk.state import read_state
from snapshot.disk.tensor_files import plan_files
from snapshot.errors import SnapshotError
from training.step import make_optimizer


@pytest.mark.parametrize("piece_bytes", [10**9, 2000])
def test_what_is_restored_is_what_was_written_in_any_pieces(tmp_path, piece_bytes):
    model, optimizer = trained(3)
    folder = write(tmp_path, 3, model, optimizer, piece_bytes=piece_bytes)
    verify(folder)
    other, other_optimizer = trained(0, seed=5)
    restore(folder, other, other_optimizer)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.equal(two)
        assert optimizer.state[one].keys() == other_optimizer.state[two].keys()
        for key, value in optimizer.state[one].items():
            assert value.equal(other_optimizer.state[two][key]), key
            assert value.stride() == other_optimizer.state[two][key].stride()
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(SHAPE.vocab_size, (2, SHAPE.block_size))
    with torch.no_grad():
        assert torch.allclose(model.eval()(ids), theirs(ids).logits, atol=1e-5)


def test_no_piece_is_larger_than_asked_unless_one_tensor_is(tmp_path):
    shapes = {"a": (50,), "b": (60,), "c": (200,), "d": (10,), "e": (80,)}
    files = plan_files(shapes, "model", 4 * 100)
    assert [[*file.shapes] for file in files] == [["a"], ["b"], ["c"], ["d", "e"]]
    assert files[0].name == "model-00001-of-00004.safetensors"


def test_what_a_kill_may_leave_is_removed_and_steps_are_ordered_as_numbers(tmp_path):
    for name in ("step-99999999", "step-100000000", "step-00000007", "other", ".tmp-step-9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    (tmp_path / ".tmp-file").write_text("")
    (tmp_path / ".tmp-link").symlink_to(tmp_path)
    names = [folder.name for folder in snapshot_folders(tmp_path)]
    assert names == ["step-100000000", "step-99999999", "step-00000007"]
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*names, "other"}


@pytest.mark.parametrize(
    ("sizes", "words"),
    [({"n_embd": 16}, "shape"), ({"n_layer": 3}, r"does not hold transformer\.h\.2")],
)
def test_a_model_of_another_shape_is_refused(tmp_path, sizes, words):
    folder, other = write(tmp_path, 1, *trained(1)), GPT(replace(SHAPE, **sizes))
    with pytest.raises(SnapshotError, match=words):
        restore(folder, other, make_optimizer(other, OptimConfig(), torch.device("cpu"), "no"))


def test_another_format_version_is_refused(tmp_path):
    folder = write(tmp_path, 1, *trained(1))
    content = json.loads((folder / "state.json").read_text())
    for found, sentence in (
        (99, "format version 99; this program reads version 2"),
        (1, "was written by 0.1.0: train on from its weights with model.pretrained="),
    ):
        (folder / "state.json").write_text(json.dumps({**content, "format_version": found}))
        with pytest.raises(SnapshotError, match=sentence):
            read_state(folder)
