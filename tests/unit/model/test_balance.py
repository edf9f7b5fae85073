"""The load-balancing loss of mixtures: transformers' own of a row, however a batch is divided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import families
from model.families import build_model
from model.head import IGNORED
from model.layout import ModelError
from snapshot.disk.model import model_config

T = 24
EVERY = {**families.FAMILIES, **families.OTHERS}
MIXTURES = {
    **{name: EVERY[name] for name in ("mixtral", "qwen3 moe", "olmoe")},
    "dense and mixed": {
        **EVERY["qwen3 moe"],
        "mlp_only_layers": [0],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 24,
    },
}


def built(name: str = "mixtral", recompute: bool = False, **entries: object):
    """A model whose loss in training has the load-balancing loss."""
    torch.manual_seed(3)
    content = {**MIXTURES[name], **families.BALANCED, **entries}
    config = replace(model_config(content, name), activation_checkpointing=recompute)
    model = build_model(config).train()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(families.VOCABULARY, (count, T + 1))
    return ids[:, :-1], ids[:, 1:].clone()


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()}


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MIXTURES)
def test_of_one_row_it_is_transformers_own(name):
    model = built(name)
    content = {**MIXTURES[name], **families.BALANCED}
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    theirs = AutoModelForCausalLM.from_config(config)
    theirs.load_state_dict(model.lm.state_dict())
    ids, targets = rows(1)
    output = theirs(ids, labels=ids, shift_labels=targets)
    loss = model(ids, targets)
    assert output.aux_loss > 1
    assert loss.item() == pytest.approx(output.loss.item(), rel=1e-5)
    found, expected = gradients(model, loss), gradients(theirs, output.loss)
    assert_same({name.removeprefix("lm."): one for name, one in found.items()}, expected)


def test_rows_have_it_by_themselves_and_weigh_as_their_targets():
    """Alone in batches of their own they have the same loss and gradients."""
    model = built()
    ids, targets = rows(3)
    targets[0, 5:], targets[1, :7], targets[2, 20:] = IGNORED, IGNORED, IGNORED
    shares = (targets != IGNORED).sum(1) / (targets != IGNORED).sum()
    loss = model(ids, targets)
    found = gradients(model, loss)
    alone = torch.stack([model(ids[n : n + 1], targets[n : n + 1]) for n in range(3)])
    mean = (alone * shares).sum()
    assert loss.item() == pytest.approx(mean.item(), rel=1e-6)
    assert_same(found, gradients(model, mean))


def test_padding_and_evaluations_do_not_count():
    model = built()
    ids, targets = rows(1)
    loss = model(ids, targets)
    padded = torch.cat((ids, ids.flip(1)), 1), torch.cat((targets, targets * 0 + IGNORED), 1)
    assert model(*padded).item() == pytest.approx(loss.item(), rel=1e-6)
    nothing = model(ids, torch.full_like(targets, IGNORED))  # as of a process without a sequence
    assert nothing.item() == 0
    assert all(one.eq(0).all() for one in gradients(model, nothing).values())
    held_out = model.eval()(ids, targets)
    assert held_out.item() == built(output_router_logits=False).eval()(ids, targets).item()


def test_checkpointing_computes_the_same():
    ids, targets = rows(2)
    plain, checkpointed = built(), built(recompute=True)
    losses = [model(ids, targets) for model in (plain, checkpointed)]
    assert losses[0].equal(losses[1])
    assert_same(gradients(checkpointed, losses[1]), gradients(plain, losses[0]))


OF_4 = {**families.ROTARY, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("doge", {"is_moe": True, "num_experts": 16}),  # another function
        ("gpt_oss", {"num_local_experts": 4}),  # not measured to compute its logits plainly
    ],
)
def test_a_model_with_another_loss_can_be_used_but_not_trained(family, entries):
    content = {**OF_4, **entries, "model_type": family}
    model = build_model(model_config({**content, **families.BALANCED}, ""))
    assert model.eval()(*rows(1)).isfinite()
    with pytest.raises(ModelError, match=rf"load-balancing loss of {family}, .* is not supported"):
        model.refuse_undescribed()
    built().refuse_undescribed()
    build_model(model_config(content, "")).refuse_undescribed()
