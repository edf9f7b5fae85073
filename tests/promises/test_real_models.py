"""Models of the Hub in the files that their repos have, and not in those that transformers saves.

Each loads, is trained, generates text, and its snapshot is a model of transformers again.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import families
import real_models
import runs
import sample
from data.subwords import tokenizer_of
from snapshot.disk.folder import read_json, write_json
from snapshot.errors import SnapshotError
from snapshot.named_model import find_model

QUICK = ("gpt2",)
SAMPLED = ("temperature", "top_k", "top_p", "do_sample", "repetition_penalty")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """The folder of a model, made once."""
    root, made = tmp_path_factory.mktemp("real"), {}

    def folder(name: str):
        if name not in made:
            made[name] = real_models.make(name, root / name)
        return made[name]

    return folder


def each(thorough):
    """All models, those that are not quick with a mark."""
    return [
        pytest.param(name, marks=() if name in QUICK else thorough) for name in real_models.NAMES
    ]


def ends_of(model) -> set[int]:
    """The tokens at which transformers stops a model."""
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}


@pytest.mark.parametrize("name", real_models.NAMES)
def test_its_files_mean_what_transformers_reads_in_them(folder_of, name):
    """Logits, the end of a text, and a prompt."""
    folder = folder_of(name)
    tokenizer, reference = tokenizer_of(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.end_of_text == reference.eos_token_id
    text = "the run"
    assert [*tokenizer.before_text, *tokenizer.encode(text)] == reference(text).input_ids
    families.assert_computed_by_transformers(folder)


@pytest.mark.parametrize("name", each(pytest.mark.slow))
def test_its_snapshot_is_a_model_of_transformers(folder_of, name, small, tmp_path):
    """Two steps, a sample, a snapshot with the logits and the ends of transformers' own model.

    The run then resumes from it.
    """
    folder, run_dir = folder_of(name), tmp_path / "run"
    words = [word for word in small if not word.startswith(("model.n_", "optim."))]
    words += [f"model.pretrained={folder}", "train.max_steps=2", "train.sample_every=2"]
    result = runs.train(*words, f"run.dir={run_dir}", code=0)
    assert "optimizer adamw, learning rate 3e-05\n" in result.stdout
    assert [one["step"] for one in runs.metrics(run_dir, "sample")] == [2]
    saved = runs.snapshot(run_dir, 2)
    families.assert_computed_by_transformers(saved)
    before, after = families.theirs(folder), families.theirs(saved)
    assert ends_of(after) == ends_of(before)
    for key in SAMPLED:
        assert getattr(after.generation_config, key) == getattr(before.generation_config, key)
    text = "the run"
    assert (
        AutoTokenizer.from_pretrained(saved)(text).input_ids
        == AutoTokenizer.from_pretrained(folder)(text).input_ids
    )
    runs.train(*words, "train.max_steps=3", f"run.dir={run_dir}", code=0)
    assert ends_of(families.theirs(runs.snapshot(run_dir, 3))) == ends_of(before)


def test_generating_begins_and_ends_where_transformers_does(folder_of, monkeypatch, capsys):
    """sample.py: the beginning token, and every end that generation_config.json names."""
    folder = folder_of("Meta-Llama-3-8B-Instruct")
    prompts: list[list[int]] = []
    ends = AutoTokenizer.from_pretrained(folder)(["<|end_of_text|>", "<|eot_id|>"]).input_ids
    for length, (_, end) in enumerate(ends):

        def drawn(model, prompt, *_, end=end, **__):
            prompts.append(prompt[0].tolist())
            return iter([torch.tensor([one]) for one in (300, end, 301)])

        monkeypatch.setattr(sample, "generate", drawn)
        more = ["--no-bos"] * length
        assert sample.main([str(folder), "--prompt", "the run", *more]) == 0
        assert "<|" not in capsys.readouterr().out
    expected = AutoTokenizer.from_pretrained(folder)("the run").input_ids
    assert prompts == [expected, expected[1:]]


def test_another_output_layer_in_the_file_is_refused_with_the_way_out(tmp_path):
    """config.json ties it all the same. And what the sentence says to do helps."""
    for name in ("gpt2", "gemma-3-1b-it"):
        folder = real_models.give_output(real_models.make(name, tmp_path / name))
        with pytest.raises(SnapshotError, match="Set tie_word_embeddings to false there"):
            find_model(str(folder)).load()
        content = read_json(folder / "config.json")
        write_json(folder / "config.json", {**content, "tie_word_embeddings": False})
        families.assert_computed_by_transformers(folder)


def test_a_file_with_the_tied_tensor_as_the_output_loads(tmp_path):
    for name in ("gpt2", "Qwen3-0.6B"):
        folder = real_models.make(name, tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        old = next(key for key in tensors if key.endswith(real_models.EMBEDDINGS))
        tensors["lm_head.weight"] = tensors.pop(old)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        families.assert_computed_by_transformers(folder)
