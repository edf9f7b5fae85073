"""Whether a snapshot belongs to the run that a configuration and its text describe."""

from __future__ import annotations

from typing import Any

from model.frozen import AUTO, FLOAT32
from snapshot.config_values import as_argument, value_of
from snapshot.disk.model import trains_adapters
from snapshot.disk.state import RunState
from snapshot.errors import OtherRun

MUST_MATCH = (
    "model.pretrained",
    "model.architecture",
    "data.block_size",
    "data.documents",
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.activation_function",
    "model.lora_rank",
    "model.lora_alpha",
    "model.lora_targets",
    "optim.freeze",
    "optim.name",
    "train.global_batch_size",
    "train.seed",
)
"""Keys that decide the model, the optimizer's state and the global batches: with another value it
is another run."""


def refuse_other_run(
    state: RunState, config: dict[str, Any], data: dict[str, Any] | None = None
) -> None:
    """Raise OtherRun with all differences, if the snapshot belongs to another run.

    `data` are the `data_facts` of the text. Without them only the configuration is compared, which
    needs nothing but the state: before the rest of a snapshot is downloaded.
    """
    # The state has a digest of the base of adapters, which is checked when that is opened. So it
    # may lie in another place now.
    checked = {"model.pretrained"} if trains_adapters(state.config) else set()
    differences = [
        f"{key}: {as_argument(before)} in the snapshot, {as_argument(now)} now"
        for key in MUST_MATCH
        if (before := value_of(state.config, key)) != (now := value_of(config, key))
        and key not in checked
    ]
    differences += _differences_of_frozen(state, config)
    differences += [] if data is None else _differences_of_text(state, config, data)
    if differences:
        raise OtherRun(
            f"the snapshot of step {state.step} belongs to another run:\n  "
            + "\n  ".join(differences)
            + "\nRestore these values, or give the new run another run.name (and hub.repo_id). To "
            "begin that one from these weights, set model.pretrained=<this run or repo>."
        )


def _differences_of_frozen(state: RunState, config: dict[str, Any]) -> list[str]:
    """How the frozen weights differ from those that were trained around; auto keeps them."""
    key = "model.frozen_dtype"
    before, now = state.frozen_dtype or FLOAT32, value_of(config, key)
    return [] if now in (AUTO, before) else [f"{key}: {before} in the snapshot, {now} now"]


def _differences_of_text(
    state: RunState, config: dict[str, Any], data: dict[str, Any]
) -> list[str]:
    """How the text and its tokens differ from those of a snapshot."""
    differences = []
    known = state.data.get("vocabulary")
    if known != data["vocabulary"]:
        differences.append(f"vocabulary: {known} tokens in the snapshot, {data['vocabulary']} now")
    if state.data.get("fingerprint") == data["fingerprint"]:
        return differences
    before, now = (value_of(values, "data.tokenizer") for values in (state.config, config))
    if before != now:  # the fingerprint is that of tokens, so the text may be the same
        known_as = f"{as_argument(before)} in the snapshot, {as_argument(now)} now"
        return [*differences, f"data.tokenizer: {known_as}"]
    of_streams = ", data.window_bytes or data.mix, or data.held_out_split"
    keys = of_streams if state.stream is not None else ""
    return [
        *differences,
        f"text: {state.data.get('name')} ({str(state.data.get('fingerprint'))[:8]}) in the "
        f"snapshot, {data['name']} ({data['fingerprint'][:8]}) now, "
        f"or another data.val_fraction{keys}",
    ]
