"""Sampling: probabilities worked out by hand, and the cache against plain generation."""

import math

import pytest
import torch

from model.generate import BrokenModel, generate, next_token_probabilities
from model.gpt import GPT, GPTConfig

V, BLOCK = 17, 8
LOGITS = [math.log(one) for one in (0.1, 0.4, 0.2, 0.3)]  # which can be added by hand


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(vocab_size=V, block_size=BLOCK, n_layer=2, n_head=2, n_embd=16, dropout=0.5)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def prompt_of(length, batch=1):
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(length))


def tokens_of(model, prompt, new_tokens, **settings):
    return torch.stack(list(generate(model, prompt, new_tokens, **settings)), dim=1)


@torch.no_grad()
def plain_generation(model, prompt, new_tokens, seed=0, **settings):
    """The reference: every token from the last `block_size` tokens, nothing kept."""
    generator = torch.Generator().manual_seed(seed)
    text = prompt
    for _ in range(new_tokens):
        logits = model(text[:, -BLOCK:])[:, -1]
        probabilities = next_token_probabilities(logits, **settings)
        text = torch.cat((text, torch.multinomial(probabilities, 1, generator=generator)), dim=1)
    return text[:, prompt.size(1) :]


@pytest.mark.parametrize(
    ("logits", "settings", "expected"),
    [
        (LOGITS, {}, [0.1, 0.4, 0.2, 0.3]),
        (LOGITS, {"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),  # squares of the above
        (LOGITS, {"temperature": 0.0, "top_k": 2, "top_p": 0.1}, [0, 1, 0, 0]),
        (LOGITS, {"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        (LOGITS, {"top_k": 99}, [0.1, 0.4, 0.2, 0.3]),
        (LOGITS, {"top_p": 0.01}, [0, 1, 0, 0]),
        (LOGITS, {"top_p": 0.65}, [0, 4 / 7, 0, 3 / 7]),
        (LOGITS, {"top_p": 0.75}, [0, 4 / 9, 2 / 9, 3 / 9]),
        (LOGITS, {"top_p": 1.0}, [0.1, 0.4, 0.2, 0.3]),
        (LOGITS, {"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]),  # of 4/7 and 3/7: top-k comes first
        (LOGITS, {"temperature": 0.5, "top_p": 0.5}, [0, 1, 0, 0]),  # 16/30 is enough by itself
        (LOGITS, {"temperature": 0.5, "top_k": 3, "top_p": 0.8}, [0, 16 / 25, 0, 9 / 25]),
        ([1.0, 3, 3, 3], {"temperature": 0.0}, [0, 1, 0, 0]),  # the first of equal ones
        ([0.0, 0, 0, 0], {"top_p": 0.5}, [0.5, 0.5, 0, 0]),
        ([0.0, 0, 0, 0], {"top_k": 1}, [1, 0, 0, 0]),
        ([300.0, -20, 5], {"temperature": 1e-38}, [1, 0, 0]),  # as good as 0
    ],
)
def test_probabilities_are_those_worked_out_by_hand(logits, settings, expected):
    probabilities = next_token_probabilities(torch.tensor(logits), **settings)

    torch.testing.assert_close(probabilities, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 5, "top_p": 0.9}],
    ids=["greedy", "sampled", "top"],
)
def test_the_cache_gives_what_plain_generation_gives(model, length, settings):
    """Within the block, over its end and past it."""
    prompt = prompt_of(length)

    made = tokens_of(model, prompt, 3 * BLOCK, seed=4, **settings)

    assert made.tolist() == plain_generation(model, prompt, 3 * BLOCK, seed=4, **settings).tolist()


def test_within_the_block_each_token_costs_one_position(model):
    lengths = []
    hook = model.register_forward_pre_hook(lambda _, args: lengths.append(args[0].size(1)))
    try:
        tokens_of(model, prompt_of(3), BLOCK)
    finally:
        hook.remove()

    assert lengths == [3, 1, 1, 1, 1, 1, BLOCK, BLOCK]


def test_the_seed_alone_decides_the_draw(model):
    prompt = prompt_of(3)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = tokens_of(model, prompt, 20, seed=7)
    assert list(generate(model, prompt, 0)) == []
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)

    assert torch.equal(tokens_of(model, prompt, 20, seed=7), first)
    assert not torch.equal(tokens_of(model, prompt, 20, seed=8), first)


def test_there_is_no_dropout_and_the_mode_stays(model):
    """Also where the text is left early."""
    expected = tokens_of(model, prompt_of(3), 5)
    model.train()
    try:
        assert torch.equal(tokens_of(model, prompt_of(3), 5), expected)
        tokens = generate(model, prompt_of(3), 5)
        next(tokens)
        tokens.close()
        assert all(module.training for module in model.modules())
        assert torch.is_grad_enabled()
    finally:
        model.eval()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}])
@pytest.mark.parametrize("weight", [float("nan"), -float("inf"), 3e38])
def test_weights_that_are_broken_get_a_sentence(weight, settings):
    """Also where the most likely token is taken, which an argmax would give for anything."""
    torch.manual_seed(0)
    broken = GPT(GPTConfig(vocab_size=V, block_size=BLOCK, n_layer=1, n_head=1, n_embd=4))
    with torch.no_grad():
        broken.transformer.h[0].mlp.c_proj.weight.fill_(weight)
        broken.transformer.h[0].mlp.c_fc.weight.fill_(1.0)
        broken.transformer.h[0].mlp.c_fc.bias.fill_(1.0)

    with pytest.raises(BrokenModel, match=r"after 0 tokens: its weights are not finite, or far"):
        tokens_of(broken, prompt_of(3), 5, **settings)
    assert broken.training


def test_weights_that_break_later_are_named_where_they_do(model):
    """A position that only the sixth token sees."""
    broken = GPT(model.config)
    broken.load_state_dict(model.state_dict())
    with torch.no_grad():
        broken.transformer.wpe.weight[7] = torch.nan

    with pytest.raises(BrokenModel, match="after 5 tokens"):
        tokens_of(broken, prompt_of(3), 20)
