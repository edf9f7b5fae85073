"""Frozen parameters: not trained, without optimizer state, in any shape, and refused by name."""

from __future__ import annotations

import pytest
import torch

import runs
from config.schema import ConfigError
from model.gpt import GPT, GPTConfig
from training.step import freeze

FROZEN = ('optim.freeze=["*.wpe.*","*.h.0.*"]', "model.frozen_dtype=bf16")


@pytest.fixture(scope="module")
def frozen_run(small, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("frozen") / "run"
    result = runs.train(*small, *FROZEN, "train.max_steps=20", f"run.dir={run_dir}", code=0)
    assert "of them, by optim.freeze=['*.wpe.*', '*.h.0.*'], kept in bf16" in result.stdout
    return run_dir


def test_frozen_parameters_keep_their_values_and_have_no_state(frozen_run):
    first, last = (runs.tensors(runs.snapshot(frozen_run, step)) for step in (10, 20))
    frozen = [name for name in first if "wpe" in name or ".h.0." in name]
    assert frozen
    assert not [name for name in frozen if name.endswith((".exp_avg", ".exp_avg_sq", ".step"))]
    for name in first:
        if not name.endswith(".step"):
            assert first[name].equal(last[name]) == (name in frozen), name
    # Matrices are kept in bf16, and written in float32.
    in_bf16 = [name for name in frozen if first[name].dim() > 1]
    assert all(first[name].equal(first[name].bfloat16().float()) for name in in_bf16)
    assert {one.dtype for one in first.values()} == {torch.float32}


def test_another_choice_is_another_run(small, frozen_run):
    result = runs.train(*small, f"run.dir={frozen_run}", code=2)
    assert 'optim.freeze: ["*.wpe.*","*.h.0.*"] in the snapshot, [] now' in result.stderr
    assert "model.frozen_dtype" not in result.stderr  # auto is what the run has
    result = runs.train(
        *small, FROZEN[0], "model.frozen_dtype=float32", f"run.dir={frozen_run}", code=2
    )
    assert "model.frozen_dtype: bf16 in the snapshot, float32 now" in result.stderr


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        (["*.h.7.*"], "'*.h.7.*' matches no parameter of the model. Their names run from"),
        (["*"], "freezes all parameters"),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_refused(patterns, sentence):
    model = GPT(GPTConfig(vocab_size=5, block_size=4, n_layer=2, n_head=1, n_embd=4))
    with pytest.raises(ConfigError) as refused:
        freeze(model, patterns)
    assert sentence in str(refused.value)
