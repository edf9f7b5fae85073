"""benchmarks/gpu.py, rehearsed without a GPU: nothing ends it, and it resumes where it stopped."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from accelerate.state import AcceleratorState

import runs

sys.path.append(str(runs.ROOT / "benchmarks"))  # last: its data.py is not the room of that name
import gpu
import gpu_items

TINY = gpu_items.Settings("unused", rehearse=True)
NANOGPT = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.n_embd)

    def configure_optimizers(self, decay, rate, betas, device):
        return torch.optim.AdamW(self.parameters(), rate, betas, weight_decay=decay)

    def forward(self, ids, targets):
        logits = self.table(ids) @ self.table.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.fixture(autouse=True)
def no_accelerator_before():
    """An Accelerator of another test in this process would decide the precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_without_a_gpu_or_the_right_folder_a_sentence_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "--rehearse" in capsys.readouterr().err
    assert gpu.main(["--rehearse", "--nanogpt", str(tmp_path)]) == 2
    assert f"--nanogpt {tmp_path} has no model.py" in capsys.readouterr().err


SHARED = {
    "shared sequences": ("context parallelism", "share each sequence"),
    "shared matrices": ("tensor parallelism", "share each matrix"),
}
"""Items of two GPUs: what they share, and the name of the row."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_rehearsal_takes_every_path_also_after_it_was_killed(tmp_path):
    (tmp_path / "model.py").write_text(NANOGPT)
    folder, results = tmp_path / "work", tmp_path / "gpu.json"
    command = [sys.executable, str(runs.ROOT / "benchmarks" / "gpu.py"), "--rehearse"]
    command += ["--nanogpt", str(tmp_path), "--folder", str(folder), "--results", str(results)]

    def items() -> dict:
        if not results.exists():
            return {}
        (only,) = json.loads(results.read_text()).values()
        return only["items"]

    with runs.started(command, tmp_path / "killed.out") as process:
        runs.wait_until(lambda: len(items()) >= 2, process, deadline=600)
    before = items()
    assert 2 <= len(before) < len(gpu_items.ITEMS)
    done = runs.run(command, deadline=1500)
    assert done.returncode == 0, done.stderr

    found = items()
    assert {name: found[name] for name in before} == before
    assert not any(f"\n{name}: done" in done.stdout for name in before)
    errors = {name: result["error"] for name, result in found.items() if "error" in result}
    assert errors == {}
    assert list(found) == [item.name for item in gpu_items.ITEMS]
    check_rows({name: result["rows"] for name, result in found.items()})
    for item in gpu_items.ITEMS:
        assert f"### {item.group}\n" in done.stdout
    assert "not measured yet" not in done.stdout


def check_rows(rows: dict[str, list[dict]]) -> None:
    """Every item has the figures that its group is about."""
    assert {row["result"] for row in rows["tests"]} == {"skipped"}  # there is no CUDA device
    assert [row["result"] for row in rows["resume"]] == ["the same bits"] * 2
    names = ["train.py", "nanoGPT", "bare loop", "train.py, compiled whole"]
    assert [row["contestant"] for row in rows["contest, compiled"]] == names
    assert [row["contestant"] for row in rows["contest, eager"]] == names[:3]
    assert all(row["train.py / this"] > 0 for row in rows["contest, compiled"])
    for item, (_, name) in SHARED.items():
        assert [row["two GPUs"] for row in rows[item]] == [name, "have sequences of their own"]
        assert all(row["tokens/s"] > 0 for row in rows[item])
    assert all(row["stalls for s"] >= 0 < row["snapshot MB"] for row in rows["snapshots"])
    for item in gpu_items.ITEMS:
        of_updates = item.group in ("micro-batches", "large models", "other modes")
        for row in rows.get(item.name, []) if of_updates else []:
            assert row["tokens/s"] > 0
            if row["compiled"] == "no" and "FSDP" not in row and row["precision"] != "fp8":
                # The allocation log counts what plan.py predicts.
                assert row["plan / peak"] == pytest.approx(1, abs=0.01)
