"""The model card of a run's repo: what was trained on what, how far, and what to do with it."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from huggingface_hub import ModelCardData

from data.formats import TABLE_READERS, TEXT_SUFFIXES, suffixes
from data.printable import printable
from model.gpt import GPTConfig
from snapshot.disk.state import RunState
from snapshot.hub.publish import CURVES

SHOWN = (
    ("optim.learning_rate", "learning rate"),
    ("train.global_batch_size", "sequences a step"),
    ("train.max_steps", "steps of the whole run"),
    ("train.seed", "seed"),
)


def card_text(
    repo_id: str,
    state: RunState,
    shape: GPTConfig,
    versions: Mapping[str, str],
    *,
    sample: str | None = None,
    has_curves: bool = False,
) -> str:
    """README.md of a repo whose newest snapshot is of `state`.

    `sample`: a text of the model's own.
    """
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gpt2", "character-level", "accelerate"],
    )
    name = state.config["run"]["name"]
    loss = state.best_loss
    facts = [
        ("text", f"{_public_name(state.data['name'])}, {state.data['characters']:,} characters"),
        ("vocabulary", f"{shape.vocab_size} characters"),
        (
            "model",
            f"GPT-2, {shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} wide, context "
            f"{shape.block_size}",
        ),
        ("step", f"{state.step:,} (epoch {state.epoch + 1})"),
    ]
    if loss is not None:
        bits = f"{loss / math.log(2):.4f} bits"
        facts.append(("best held-out loss", f"{loss:.4f} nats per character, {bits}"))
    facts += [(label, _value(state.config, key)) for key, label in SHOWN]
    facts.append(("versions", ", ".join(f"{name} {found}" for name, found in versions.items())))
    rows = "\n".join(f"| {label} | {_cell(value)} |" for label, value in facts)
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {_cell(name)}",
        "A GPT of characters, trained with accelerate-gpt. This repo is its checkpoint store: the "
        f"files at the top are the newest snapshot's weights, of step {state.step:,}; "
        "`snapshots/` holds what is needed to go on.",
        f"| | |\n|---|---|\n{rows}",
    ]
    if has_curves:
        parts.append(f"![Training and held-out loss over steps]({CURVES})")
    if sample:
        parts.append(f"## A sample\n\n{_fenced(printable(sample.strip(), multiline=True))}")
    parts.append(
        "## Use it\n\n"
        "```python\n"
        "from transformers import pipeline\n\n"
        f'speak = pipeline("text-generation", model="{repo_id}")\n'
        f"print(speak({_prompt(sample)!r}, max_new_tokens={max(1, shape.block_size - 16)}"
        ")[0]"
        '["generated_text"])\n'
        "```\n\n"
        "It knows the characters of its text and no others, and a context of "
        f"{shape.block_size} characters. With this project's own sampling, which goes past the "
        f"context: `python sample.py {repo_id}`."
    )
    parts.append(
        "## Go on training\n\n"
        "The command that began it goes on with it, on any machine that may write here: it has "
        f"`hub.repo_id={repo_id}`. To begin another run from it:\n\n"
        "```bash\n"
        f"accelerate launch train.py run.name=another snapshot.resume={repo_id} ...\n"
        "```"
    )
    return "\n\n".join(parts) + "\n"


def _value(config: Mapping[str, Any], key: str) -> str:
    section, name = key.split(".")
    return str(config.get(section, {}).get(name, "unknown"))


def _public_name(source: str) -> str:
    """What `data.source` names, without this machine's folders and an address's credentials."""
    if re.match(r"https?://", source):
        return re.sub(r"^(https?://)(?:[^/?#]*@)?([^?#]*).*", r"\1\2", source, flags=re.DOTALL)
    suffix, compression = suffixes(source)
    is_path = (
        source.startswith(("/", "~", "."))
        or source.count("/") > 1
        or any(mark in source for mark in "*?[")
        or suffix in (*TEXT_SUFFIXES, *TABLE_READERS)
        or compression != ""
    )
    return PurePath(source).name if is_path else source


def _cell(text: str) -> str:
    """As it is, on one line: no markup, and not the end of a table's cell."""
    plain = html.escape(printable(" ".join(str(text).split())), quote=False)
    return re.sub(r"([\\`*\[\]|])", r"\\\1", plain)


def _fenced(text: str) -> str:
    """A text that may itself hold fences."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


def _prompt(sample: str | None) -> str:
    """Something the model knows: the beginning of its own sample."""
    words = (sample or "").split()
    return words[0][:8] if words else "a"
