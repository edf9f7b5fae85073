"""Promise 6 for servers of last year: a snapshot means the same to transformers 4."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

import runs
from model.families import build_model
from model.older_config import with_older_entries
from snapshot.disk.load import restore_weights
from snapshot.disk.model import model_config

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    **YARN,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "plain": LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 123.0}),
    "llama3": LlamaConfig(**SIZES, rope_parameters={**LLAMA3, "rope_theta": 456.0}),
    "yarn": Qwen3Config(**SIZES, rope_parameters={**YARN, "rope_theta": 789.0}),
    "by layer": Gemma3TextConfig(
        **SIZES,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=8,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1234.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 56.0},
        },
    ),
}
PACKAGES = ("transformers==4.57.6", "huggingface_hub<1")
LOGITS = """
import json, sys
import torch, transformers
assert transformers.__version__.startswith("4.57")
found = {}
for name, folder in json.loads(sys.argv[1]).items():
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    length = min(120, model.config.max_position_embeddings)
    ids = torch.arange(length)[None] % model.config.vocab_size
    found[name] = model.eval()(ids).logits[0, -1].tolist()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders whose config.json our snapshots would have, by name."""
    made = {}
    for name, config in CONFIGS.items():
        folder = made[name] = tmp_path_factory.mktemp("model")
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        assert "rope_theta" not in written
        sizes = model_config(written, name)
        (folder / "config.json").write_text(json.dumps(sizes.config_json()))
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_version_5_reads_the_entries_of_both_versions_as_its_own(folders, name):
    content = json.loads((folders[name] / "config.json").read_text())
    before, after = CONFIGS[name], AutoConfig.from_pretrained(folders[name])
    assert after.rope_parameters == before.rope_parameters
    assert content["torch_dtype"] == content["dtype"] == "float32"
    assert content["rope_theta"] in (123.0, 456.0, 789.0, 1234.0)
    assert ("rope_scaling" in content) == (name in ("llama3", "yarn"))
    assert with_older_entries(content) == content


@pytest.mark.slow
def test_version_4_computes_the_logits_of_a_snapshot(folders, finished_run, tmp_path):
    """In an environment of its own, whose packages come from the index."""
    names = {name: str(folder) for name, folder in folders.items()}
    names["our GPT"] = str(runs.snapshot(finished_run, 30))
    target = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
    subprocess.run([*install, *PACKAGES], check=True, timeout=runs.DEADLINE_SECONDS)
    result = subprocess.run(
        [sys.executable, "-c", LOGITS, json.dumps(names)],
        env=runs.environment(PYTHONPATH=str(target)),
        capture_output=True,
        text=True,
        timeout=runs.DEADLINE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for name, logits in json.loads(result.stdout.splitlines()[-1]).items():
        folder = Path(names[name])
        content = json.loads((folder / "config.json").read_text())
        model = build_model(model_config(content, name)).eval()
        restore_weights(folder, model)
        length = min(120, model.config.block_size)
        ids = torch.arange(length)[None] % model.config.vocab_size
        with torch.no_grad():
            assert (model(ids)[0, -1] - torch.tensor(logits)).abs().max() < 1e-5, name
