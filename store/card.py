"""The model card of a run's repo: model, text, progress, and how to use them."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import huggingface_hub  # imports the rest at its first use

from common.printable import printable
from data.public_names import public_name
from model.family import ModelConfig
from snapshot.config_values import value_of
from snapshot.disk.folder import folder_name
from snapshot.disk.model import trains_adapters
from snapshot.disk.state import RunState, bits_per_byte, loss_in_words, lost_facts, token_unit
from store.attempt import CURVES, Best
from store.hub import REPO_ID
from store.kinds import NAMED_REPO
from store.records import EVENTS, METRICS

SHOWN = (
    ("optim.learning_rate", "learning rate"),
    ("train.global_batch_size", "sequences a step"),
    ("train.max_steps", "steps of the whole run"),
    ("train.seed", "seed"),
)
LANGUAGES = {"python-docs": "en", "python-stdlib": "code"}
"""By the name of a text, its language; others have `hub.language`."""
SHOWN_EVENTS = 20


def card_text(
    repo_id: str,
    state: RunState,
    shape: ModelConfig,
    versions: Mapping[str, str],
    *,
    sample: str | None = None,
    has_curves: bool = False,
    events: Sequence[Mapping[str, Any]] = (),
    best: Best | None = None,
    speed: str | None = None,
    proof: str | None = None,
) -> str:
    """README.md of a repo whose newest snapshot is that of `state`.

    `sample` is a text that the model has generated, `events` are the lines of events.jsonl,
    `speed` is that of the newest steps, `proof` what was checked before the run.
    """
    unit, has_adapters = token_unit(state.data), trains_adapters(state.config)
    parts = [
        f"---\n{_metadata(repo_id, state, shape).to_yaml()}\n---",
        f"# {_cell(state.config['run']['name'])}",
        f"A GPT of {unit}s, trained with accelerate-gpt. This repo is its checkpoint store: "
        f"{_files_at_the_top(state)}, of step {state.step:,}; "
        "`snapshots/` holds what is needed to continue training.",
        _facts_table(state, shape, versions, speed, proof),
    ]
    if has_curves:
        parts.append(f"![Training and held-out loss over steps]({CURVES})")
    if sample:
        parts.append(f"## A sample\n\n{_fenced(printable(sample.strip(), multiline=True))}")
    if best is not None:
        parts.append(
            f"`snapshots/{folder_name(best.step)}-...` is the snapshot with the lowest held-out "
            f"loss, {best.loss:.4f} nats per {unit}."
        )
    if has_adapters and _base_model(state) is None:
        parts.append("The base is no repo of the Hub, but a folder of the machine that trained it.")
    elif shape.in_transformers:
        parts.append(_generate_text(repo_id, shape, sample, unit))
    parts.append(_continue_training(repo_id))
    if events:
        parts.append(_history(events))
    return "\n\n".join(parts) + "\n"


def _files_at_the_top(state: RunState) -> str:
    what = "adapters (LoRA) for the base" if trains_adapters(state.config) else "weights"
    return f"the files at the top are the newest snapshot's {what}"


def _metadata(repo_id: str, state: RunState, shape: ModelConfig) -> huggingface_hub.ModelCardData:
    """The fields that the Hub shows, and filters by."""
    name, unit = _shown_name(state.data["name"]), token_unit(state.data)
    has_adapters = trains_adapters(state.config)
    return huggingface_hub.ModelCardData(
        library_name="peft" if has_adapters else "transformers" if shape.in_transformers else None,
        pipeline_tag="text-generation",
        license=value_of(state.config, "hub.license"),
        language=value_of(state.config, "hub.language") or LANGUAGES.get(name),
        datasets=[one for one in _sources(state) if _is_dataset(one)] or None,
        base_model=_base_model(state),
        tags=[
            shape.family,
            *(["character-level"] if unit == "character" else []),
            *(["lora"] if has_adapters else []),
            "accelerate",
        ],
        model_name=repo_id.partition("/")[2],
        eval_results=_results(state, name, name if _is_dataset(state.data["name"]) else "text"),
    )


def _sources(state: RunState) -> list[str]:
    """What was trained on: the text, or the sources of a stream."""
    return [state.data["name"]] if state.stream is None else [one["source"] for one in state.stream]


def _is_dataset(source: str) -> bool:
    """Whether a source is a data set of the Hub."""
    return source == _shown_name(source) and REPO_ID.fullmatch(source) is not None


def _base_model(state: RunState) -> str | None:
    """The repo of the Hub that the run began from: a model, or another run's."""
    if state.base is not None:
        name = state.base
    elif state.origin is not None:
        name = str(value_of(state.config, "snapshot.resume"))
    else:
        return None
    repo = NAMED_REPO.fullmatch(name)
    return None if repo is None else repo[2]


def _results(state: RunState, name: str, dataset: str) -> list[huggingface_hub.EvalResult] | None:
    """The lowest held-out loss of the run, as the Hub lists results."""
    loss, unit = state.best_loss, token_unit(state.data)
    if loss is None:
        return None
    figures = {f"nats per {unit}": loss}
    if unit == "character":
        figures["bits per character"] = loss / math.log(2)
    if (per_byte := bits_per_byte(state.data, loss)) is not None:
        figures["bits per byte"] = per_byte
    return [
        huggingface_hub.EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_type=dataset,
            dataset_name=f"{name}, held out",
            metric_type="loss",
            metric_name=f"lowest held-out loss, {unit}",
            metric_value=round(figure, 4),
        )
        for unit, figure in figures.items()
    ]


def _history(events: Sequence[Mapping[str, Any]]) -> str:
    """How the run came about: a sum of its events, and the newest of them."""
    attempts = {event["attempt"] for event in events}
    machines = {event["text"] for event in events if event["event"] == "machine"}
    warnings = sum(event["event"] == "warning" for event in events)
    counts = (len(attempts), "attempt"), (len(machines), "kind of machine"), (warnings, "warning")
    total = ", ".join(f"{n} {noun}{'' if n == 1 else 's'}" for n, noun in counts)
    rows = [
        f"| {event['time'][:16].replace('T', ' ')} | {event['step']:,} | {event['event']} "
        f"| {_cell(event['text'])} |"
        for event in events[-SHOWN_EVENTS:]
    ]
    return (
        f"## History\n\n{total.replace('kind of machines', 'kinds of machines')}; all of it is in "
        f"`{EVENTS}`, the figures of every step in `{METRICS}`.\n\n"
        "| UTC | step | event | |\n|---|---|---|---|\n" + "\n".join(rows)
    )


def _facts_table(
    state: RunState,
    shape: ModelConfig,
    versions: Mapping[str, str],
    speed: str | None,
    proof: str | None,
) -> str:
    facts = [
        *_text_facts(state),
        *lost_facts(state.data),
        ("vocabulary", f"{shape.vocab_size:,} {token_unit(state.data)}s"),
        ("tokenizer", _shown_name(str(value_of(state.config, "data.tokenizer")))),
        (
            "model",
            f"{shape.family}, {shape.n_layer} layers, {shape.n_head} "
            f"heads, {shape.n_embd} wide, context {shape.block_size}",
        ),
        ("step", f"{state.step:,} (epoch {state.epoch + 1})"),
    ]
    if (loss := state.best_loss) is not None:
        facts.append(("best held-out loss", loss_in_words(state.data, loss)))
    facts += [(label, str(value_of(state.config, key))) for key, label in SHOWN]
    if speed is not None:
        facts.append(("speed", f"{speed}, on {state.computed_on or 'an unknown machine'}"))
    if proof is not None:
        facts.append(("proven before step 1", f"{proof} (proof.json)"))
    facts.append(("versions", ", ".join(f"{name} {found}" for name, found in versions.items())))
    rows = "\n".join(f"| {label} | {_cell(value)} |" for label, value in facts)
    return f"| | |\n|---|---|\n{rows}"


def _text_facts(state: RunState) -> list[tuple[str, str]]:
    """What was trained on: a text, or the blocks of each source of a stream."""
    if state.stream is None:
        name = _shown_name(state.data["name"])
        return [("text", f"{name}, {state.data['characters']:,} characters")]
    return [
        (
            "streamed text",
            f"{_shown_name(one['source'])}{'@' * bool(one['revision'])}{one['revision'] or ''}: "
            f"{one['blocks']:,} blocks, to row {one['row']:,} of window {one['window']:,} in "
            f"epoch {one['epoch'] + 1:,}",
        )
        for one in state.stream
    ]


def _generate_text(repo_id: str, shape: ModelConfig, sample: str | None, unit: str) -> str:
    length = max(1, shape.block_size - 16)
    knows = "the characters of its training text and no others, and " if unit == "character" else ""
    return (
        "## Generate text\n\n"
        "```python\n"
        "from transformers import pipeline\n\n"
        f'generate = pipeline("text-generation", model="{repo_id}")\n'
        f"outputs = generate({_prompt(sample)!r}, max_new_tokens={length})\n"
        'print(outputs[0]["generated_text"])\n'
        "```\n\n"
        f"The model has {knows}a context of {shape.block_size} {unit}s. This project's own "
        f"sampling also generates texts longer than the context: `python sample.py {repo_id}`."
    )


def _continue_training(repo_id: str) -> str:
    return (
        "## Continue training\n\n"
        "The command that started the run continues it, on any machine that may write to this "
        f"repo: it has `hub.repo_id={repo_id}`. To start another run from it:\n\n"
        "```bash\n"
        f"accelerate launch train.py run.name=another snapshot.resume={repo_id} ...\n"
        "```"
    )


def _shown_name(source: str) -> str:
    """The name of a source; of a URL without the sign for what followed `?`."""
    return public_name(source).removesuffix("?***").removesuffix("#***")


def _cell(text: str) -> str:
    """A text on one line, escaped: neither markup nor the end of a table's cell."""
    plain = html.escape(printable(" ".join(str(text).split())), quote=False)
    return re.sub(r"([\\`*\[\]|])", r"\\\1", plain)


def _fenced(text: str) -> str:
    """A code block of a text that may itself contain fences."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


def _prompt(sample: str | None) -> str:
    """A prompt of characters that the model has: the beginning of its own sample."""
    words = (sample or "").split()
    return words[0][:8] if words else "a"
