"""GPT-2 in plain torch, against transformers' own."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import model.head
from config.compose import load_config
from config.schema import gpt_config
from model.attention import LONGEST_PRODUCTS
from model.family import parameter_count
from model.gpt import ACTIVATIONS, GPT, GPTConfig
from model.head import IGNORED
from planning.allocation_log import LiveBytes

B, T, V = 2, 12, 31
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
}
SHAPE = {"vocab_size": V, "block_size": T, "n_layer": 3, "n_head": 4, "n_embd": 16}


@pytest.fixture(params=[LONGEST_PRODUCTS, 0], ids=["products", "kernel"])
def way(request, monkeypatch):
    """Attention of a CPU, by products and by torch's kernel."""
    monkeypatch.setattr("model.attention.LONGEST_PRODUCTS", request.param)


EACH_WAY = pytest.mark.usefixtures("way")


def random_model(**changes):
    """A model whose every parameter, biases and norms too, is away from its first value."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SHAPE, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def random_ids(seed=1):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(model, ids, targets):
    model.zero_grad()
    loss = model(ids, targets)
    loss.backward()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    return loss, {name: parameter.grad.clone() for name, parameter in trained.items()}


@EACH_WAY
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", range(1, T))
def test_no_position_sees_a_later_token(position, precision):
    model = random_model().eval()
    ids = random_ids()
    changed = ids.clone()
    changed[:, position:] = (changed[:, position:] + 7) % V

    is_half = precision != torch.float32
    with torch.no_grad(), torch.autocast("cpu", precision, enabled=is_half):
        before, after = model(ids), model(changed)

    nearly = 0 if is_half else 1e-6
    torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=nearly)
    assert (after[:, position:] != before[:, position:]).any(dim=-1).all()


@EACH_WAY
def test_no_gradient_flows_back_from_an_earlier_loss():
    """In training mode, where attention may take another path."""
    model = random_model(dropout=0.1)
    embedded = []
    model.transformer.drop.register_forward_pre_hook(lambda _, args: embedded.append(args[0]))

    logits = model(random_ids())
    (gradient,) = torch.autograd.grad(logits[:, 4].sum(), embedded)

    assert (gradient[:, 5:] == 0).all()
    assert (gradient[:, :5] != 0).any(dim=-1).all()


@EACH_WAY
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("n_head", [1, 4])
def test_logits_and_loss_are_those_of_transformers(n_head, activation):
    model = random_model(n_head=n_head, activation_function=activation).eval()
    reference = GPT2LMHeadModel(GPT2Config(**model.config.config_json())).eval()
    layout = model.layout()
    weights = {
        name: one.detach().t() if layout.is_transposed(name) else one.detach()
        for name, one in layout.parameters().items()
    }
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    ids = random_ids()

    with torch.no_grad():
        theirs = reference(ids, labels=ids)
        torch.testing.assert_close(model(ids), theirs.logits, rtol=0, atol=1e-4)
        loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    torch.testing.assert_close(loss, theirs.loss, rtol=0, atol=1e-4)


@pytest.mark.parametrize("vocabulary", [V, 8])
def test_the_loss_of_padding_alone_is_0_and_so_are_its_gradients(vocabulary):
    """Of all logits at once, or in pieces: a process without a sequence computes both."""
    model = random_model(vocab_size=vocabulary)
    ids = random_ids() % vocabulary
    loss, gradients = loss_and_gradients(model, ids, torch.full_like(ids, IGNORED))
    assert loss.item() == 0
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("vocabulary", [V, 8])  # more than channels, in pieces, or fewer
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_loss_is_the_mean_over_the_targets_that_count(precision, vocabulary, monkeypatch):
    """Also in pieces: it has the gradients of the loss of all logits."""
    model, ids = random_model(vocab_size=vocabulary), random_ids() % vocabulary
    monkeypatch.setattr("model.head.LOGIT_BYTES", ids.numel() * model.config.vocab_size)  # four
    targets = random_ids(2) % vocabulary
    targets[0, 3:9] = IGNORED
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        in_pieces, its_gradients = loss_and_gradients(model, ids, targets)
        model.zero_grad()
        whole = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        whole.backward()

    nearly = 1e-6 if precision == torch.float32 else 1e-2
    torch.testing.assert_close(in_pieces, whole, rtol=1e-6, atol=0)
    assert in_pieces.dtype == torch.float32
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(its_gradients[name], parameter.grad, rtol=nearly, atol=nearly)


def test_a_large_vocabulary_is_never_in_memory_as_logits(monkeypatch):
    gpt = GPT(GPTConfig(**{**SHAPE, "vocab_size": 20_000, "block_size": 64}))
    ids = torch.zeros((2, 64), dtype=torch.int64)

    def peak(pieces):
        monkeypatch.setattr(model.head, "LOGIT_BYTES", ids.numel() * 20_000 * 4 // pieces)
        with LiveBytes() as tracker:
            gpt(ids, ids).backward()
        gpt.zero_grad()
        return tracker.totals().sum(axis=1).max()

    assert peak(4) < 0.4 * peak(1)


def test_a_gradient_of_many_positions_stays_finite_in_fp16():
    """Where one token is nearly all of a text; the loss scaler could not make it smaller."""
    head = model.head.Head(8, 20, bias=False)
    hidden = torch.full((1, 65_536, 8), 4.1)
    with torch.autocast("cpu", torch.float16):
        loss = head(hidden, torch.zeros((1, 65_536), dtype=torch.int64))
    loss.backward()
    with torch.no_grad():
        exact = (head(hidden[:, :1]).softmax(-1)[0, 0] - torch.eye(20)[0])[:, None] * 4.1
    torch.testing.assert_close(head.weight.grad, exact.expand(20, 8), rtol=1e-2, atol=1e-2)


def test_a_frozen_output_layer_has_no_gradient_and_passes_it_on():
    model, ids = random_model(), random_ids()
    _, whole = loss_and_gradients(model, ids, ids)
    model.zero_grad()
    model.lm_head.weight.requires_grad_(False)
    _, rest = loss_and_gradients(model, ids, ids)
    assert set(whole) - set(rest) == {"transformer.wte.weight"}
    for name, gradient in rest.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(preset):
    config = load_config([f"model={preset}", "data.block_size=1024"])
    with torch.device("meta"):
        model = GPT(gpt_config(config, 50257))
    assert parameter_count(model) == PUBLISHED[preset]


def test_weights_begin_as_gpt2_begins():
    torch.manual_seed(3)
    layers = 8
    model = GPT(GPTConfig(vocab_size=512, block_size=256, n_layer=layers, n_head=2, n_embd=64))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif ".ln_" in name:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * layers) if "c_proj" in name else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.06), name
            assert abs(parameter.mean().item()) < 4 * std / math.sqrt(parameter.numel()), name


def test_dropout_is_active_in_training_only():
    model = random_model(dropout=0.3)
    ids = random_ids()

    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))
    assert torch.equal(model(ids), random_model(dropout=0.0).eval()(ids))


@pytest.mark.parametrize("targets", [None, torch.zeros(1, T + 1, dtype=torch.int64)])
def test_more_positions_than_a_block_are_refused(targets):
    with pytest.raises(ValueError, match=rf"{T + 1} positions, but block_size={T}"):
        random_model()(torch.zeros(1, T + 1, dtype=torch.int64), targets)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        *(({name: 0}, f"{name}=0 must be a whole number") for name in SHAPE),
        ({"n_layer": -1}, "n_layer=-1"),
        ({"n_head": 3}, "n_embd=16 is not a multiple of n_head=3"),
        ({"dropout": -0.1}, "dropout"),
        ({"dropout": 1.5}, "dropout"),
        ({"activation_function": "relu"}, "activation_function=relu must be gelu_new or gelu"),
    ],
)
def test_a_shape_that_makes_no_model_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        GPT(GPTConfig(**{**SHAPE, **changes}))
