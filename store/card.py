"""The model card of a run's repo: model, text, progress, and how to use them."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub  # imports the rest at its first use

from common.printable import printable
from data.public_names import public_name
from model.family import ModelConfig
from snapshot.config_values import value_of
from snapshot.disk.folder import folder_name
from snapshot.disk.model import trains_adapters
from snapshot.disk.state import RunState, loss_in_words, lost_facts, token_unit
from store.attempt import CURVES, Best
from store.kinds import NAMED_REPO

TEMPLATE = Path(__file__).with_name("card.md")


def card_text(
    repo_id: str,
    state: RunState,
    shape: ModelConfig,
    versions: Mapping[str, str],
    *,
    sample: str | None = None,
    has_curves: bool = False,
    best: Best | None = None,
    speed: str | None = None,
) -> str:
    """README.md of a repo whose newest snapshot is that of `state`: card.md, filled in.

    `sample` is a text that the model has generated, `speed` is that of the newest steps.
    """
    metadata = _metadata(repo_id, state, shape)
    # The beginning of its own sample has no characters that the model lacks.
    prompt = ((sample or "").split() or ["a"])[0][:8]
    card = huggingface_hub.ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        cell=_cell,
        shown=lambda source: _cell(_shown_name(str(source))),
        value=lambda key: _cell(value_of(state.config, key)),
        repo_id=repo_id,
        state=state,
        unit=token_unit(state.data),
        shape=shape,
        lost=lost_facts(state.data),
        loss=None if state.best_loss is None else loss_in_words(state.data, state.best_loss),
        speed=speed,
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        curves=CURVES if has_curves else None,
        sample=_fenced(printable(sample.strip(), multiline=True)) if sample else None,
        best=best,
        best_folder=None if best is None else folder_name(best.step),
        has_adapters=trains_adapters(state.config),
        has_base=metadata.base_model is not None,
        prompt=repr(prompt),
        length=max(1, shape.block_size - 16),
    )
    return str(card)


def _metadata(repo_id: str, state: RunState, shape: ModelConfig) -> huggingface_hub.ModelCardData:
    """The fields that the Hub shows, and filters by."""
    unit = token_unit(state.data)
    has_adapters = trains_adapters(state.config)
    return huggingface_hub.ModelCardData(
        library_name="peft" if has_adapters else "transformers" if shape.in_transformers else None,
        pipeline_tag="text-generation",
        license=value_of(state.config, "hub.license"),
        language=value_of(state.config, "hub.language"),
        base_model=_base_model(state),
        tags=[
            shape.family,
            *(["character-level"] if unit == "character" else []),
            *(["lora"] if has_adapters else []),
            "accelerate",
        ],
        model_name=repo_id.partition("/")[2],
    )


def _base_model(state: RunState) -> str | None:
    """The repo of the Hub that the run began from: a model, or another run's."""
    name = state.base
    if name is None and state.origin is not None:
        name = str(value_of(state.config, "snapshot.resume"))
    repo = None if name is None else NAMED_REPO.fullmatch(name)
    return None if repo is None else repo[2]


def _shown_name(source: str) -> str:
    """The name of a source; of a URL without the sign for what followed `?`."""
    return public_name(source).removesuffix("?***").removesuffix("#***")


def _cell(text: object) -> str:
    """A text on one line, escaped: neither markup nor the end of a table's cell."""
    plain = html.escape(printable(" ".join(str(text).split())), quote=False)
    return re.sub(r"([\\`*\[\]|])", r"\\\1", plain)


def _fenced(text: str) -> str:
    """A code block of a text that may itself contain fences."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
