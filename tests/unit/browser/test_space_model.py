"""The page's JavaScript, in node: its logits, tokens and texts are those of torch."""

from __future__ import annotations

import pytest
import torch

import families
from data.tokenizer import CharTokenizer
from model.generate import generate, next_token_probabilities
from snapshot.named_model import find_model
from spaces import CONTEXT, in_node, random_model, space_of
from subword_folders import trained

CHARACTERS = CharTokenizer("".join(sorted("\n abcdefghijklmnopqrstuvwxyzé🙂")))
SUBWORDS = trained(300)
LENGTH = CONTEXT + 20
MODELS = {
    "characters": (CHARACTERS, {"activation_function": "gelu"}),
    "subwords": (SUBWORDS, {"activation_function": "gelu_new"}),
    "one layer, two tokens": (CharTokenizer("ab"), {"n_layer": 1, "n_embd": 6, "n_head": 3}),
}


@pytest.fixture(scope="module", params=MODELS)
def space(request, tmp_path_factory):
    """A model of transformers, and its Space."""
    tokenizer, entries = MODELS[request.param]
    folder = tmp_path_factory.mktemp("models")
    model = random_model(folder / "model", tokenizer, **entries)
    return model, space_of(model, folder / "space")


def test_logits_are_those_of_transformers_to_1e_4(space):
    model, folder = space
    theirs = families.theirs(model)
    ids = torch.randint(
        theirs.config.vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(3)
    )
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    assert expected.std() > 0.1  # a model whose logits are all alike would show nothing
    lengths = [1, 2, CONTEXT - 1, CONTEXT]
    answers = in_node(folder, *[("logits", ids[:length].tolist()) for length in lengths])
    for length, (whole, cached) in zip(lengths, answers, strict=True):
        for found in (whole, cached):
            assert (torch.tensor(found) - expected[length - 1]).abs().max() < 1e-4


def test_greedy_tokens_are_those_of_torch_beyond_the_context_too(space):
    model, folder = space
    named = find_model(str(model)).load()
    prompts = [[1], [0, 1] * CONTEXT]  # within the context, and longer than it
    options = {"length": LENGTH, "temperature": 0}
    found = in_node(folder, *[("tokens", prompt, options) for prompt in prompts])
    for prompt, tokens in zip(prompts, found, strict=True):
        theirs = generate(named, torch.tensor([prompt]), LENGTH, temperature=0)
        expected = [int(token) for token in theirs]
        end = SUBWORDS.end_of_text if named.config.vocab_size == SUBWORDS.vocab_size else None
        if end in expected:
            expected = expected[: expected.index(end)]
        assert tokens == expected


def test_files_in_parts_and_short_names_are_the_same_model(tmp_path, monkeypatch):
    pieces = families.make("gpt2", tmp_path / "pieces", pieces=True)
    monkeypatch.setattr("browser.space.PIECE_BYTES", 30_000)
    several = space_of(pieces, tmp_path / "several")
    assert len(list(several.glob("*.safetensors"))) > 1
    with torch.no_grad():
        expected = families.theirs(pieces)(torch.tensor([[5, 6, 7]])).logits[0, -1]
    ((whole, cached),) = in_node(several, ("logits", [5, 6, 7]))
    assert (torch.tensor(whole) - expected).abs().max() < 1e-4
    assert (torch.tensor(cached) - expected).abs().max() < 1e-4


def test_a_space_is_a_transformers_model_too(space):
    model, folder = space
    ids = torch.tensor([[0, 1, 1]])
    with torch.no_grad():
        assert torch.equal(families.theirs(folder)(ids).logits, families.theirs(model)(ids).logits)


@pytest.fixture(scope="module")
def any_space(tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    return space_of(random_model(folder / "model", CHARACTERS), folder / "space")


@pytest.mark.parametrize("temperature", [0, 1e-20, 0.3, 1, 5])
@pytest.mark.parametrize("top_k", [None, 1, 4, 100])
def test_probabilities_are_those_of_sample_py(any_space, temperature, top_k):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)).round(
        decimals=1
    )  # some are equal
    options = {"temperature": temperature} | ({} if top_k is None else {"topK": top_k})
    (found,) = in_node(any_space, ("probabilities", logits.tolist(), options))
    expected = next_token_probabilities(logits, temperature, top_k)
    assert (torch.tensor(found) - expected).abs().max() < 1e-6


def test_a_draw_follows_the_probabilities(any_space):
    chances = [0.0, 0.25, 0.0, 0.5, 0.25, 0.0]
    randoms = [0.0, 0.249, 0.25, 0.749, 0.75, 0.9999999999]
    found = in_node(any_space, *[("draw", chances, random) for random in randoms])
    assert found == [1, 1, 3, 3, 4, 4]
    assert in_node(any_space, ("draw", [0.0, 0.9999, 0.0], 0.99999)) == [1]  # rounded sums


def test_a_model_with_damaged_weights_says_so(tmp_path):
    model = random_model(tmp_path / "model", CHARACTERS)
    folder = space_of(model, tmp_path / "space")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4] + b"\0\0\xc0\x7f")  # not a number
    (answer,) = in_node(folder, ("tokens", [1], {"length": 3, "temperature": 1}))
    assert "logits are not finite" in answer["error"]
    weights.write_bytes(content[:-4])
    (answer,) = in_node(folder, ("tokens", [1], {"length": 3, "temperature": 1}))
    assert answer["error"].endswith("is cut off.")
