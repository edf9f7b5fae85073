"""A model that one process cannot hold is compared with two of its layers."""

from __future__ import annotations

from pathlib import Path

import pytest

import chats
import runs
from config.compose import load_config
from proving.attempts import Launch
from proving.lines import GREEN, GREY
from proving.proof import Proof, with_layers
from proving.task import STEPS, Outcome, Task
from train import main


def test_lists_of_layers_are_cut_too():
    content = {"num_hidden_layers": 3, "layer_types": ["a", "b", "a"], "sizes": [1, 2], "x": 3}
    assert with_layers(content, 2) == {
        "num_hidden_layers": 2,
        "layer_types": ["a", "b"],
        "sizes": [1, 2],
        "x": 3,
    }
    assert with_layers({"n_layer": 12}, 2) == {"n_layer": 2}


class Narrow(Launch):
    """A launch in which one process alone is killed for its memory, unless the model is cut."""

    def run(self, task: Task) -> Outcome:
        is_cut = {"model.n_layer", "model.architecture"} & task.changes.keys()
        if task.alone and not is_cut:
            return Outcome(-9, self.folder / task.run, Path("nowhere"), {})
        return super().run(task)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "of the Hub"])
def test_two_layers_are_compared_where_one_process_cannot_hold_the_model(small, tmp_path, kind):
    words = [*small, f"run.dir={tmp_path / 'run'}", "model.n_layer=3"]
    if kind != "ours":
        base = chats.make("llama tied", tmp_path / "llama")
        words = [one for one in words if not one.startswith("model.n_")]
        words += [f"model.pretrained={base}"]
    launch = Narrow(main, words, tmp_path / "proof")
    proof = Proof(launch, load_config(words))
    whole = launch.run(Task("undisturbed", "undisturbed", STEPS, describes_run=True))
    assert whole.code == 0, whole.said
    here = launch.run(Task("shape", "shape", 4, in_float32=True))
    lines = {line.name: line for line in proof.alone(here, {}, "")}
    assert lines.pop("resumed on one process").status == GREY
    assert "of 2 layers, because it cannot hold all" in lines["loss, one process"].said
    assert {line.status for line in lines.values()} == {GREEN}
    assert runs.losses(tmp_path / "proof" / "one") != runs.losses(
        tmp_path / "proof" / "undisturbed"
    )
