"""The model of the Hub or of a folder that a run trains, if it names one, on every machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.optim import Optimizer

from config.other_models import settle_rate
from config.schema import Config, ConfigError, gpt_config, lora_of, other_model, too_long
from data.chat import ChatTemplate
from data.columns import MASKED
from data.corpus import Corpus
from data.loader import CANNOT_MASK
from data.public_names import public_name
from data.tokenizer import Tokenizer, refuse_larger_than
from data.tokenizer_files import generation_settings
from model.families import build_empty
from model.family import LanguageModel
from model.frozen import AUTO, FLOAT32, NF4, FrozenError, keep_frozen, refuse_without_kernels
from model.gpt import GPT2
from model.lora import Lora, LoraError
from snapshot.base import Base, check_weights, digest_of, open_base, open_base_of
from snapshot.disk.load import TensorReader, restore, restore_weights
from snapshot.disk.model import (
    WHOLE,
    Adapters,
    check_described,
    layout_for,
    model_errors,
    read_adapters,
)
from snapshot.disk.state import RunState
from snapshot.start import Start
from training.distributed.processes import (
    decided_by_main,
    local_main_first,
    run_on_all,
    run_on_main,
)

IN_FILES = {"BF16": "bf16", "F16": "fp16"}
"""`model.frozen_dtype` by safetensors' name of a dtype that it holds without loss."""

OF_TRAINING = ("dropout", "activation_checkpointing", "lora")
"""Fields of a model's sizes that whoever loads a snapshot decides anew."""


def refuse_undescribed(config: Config) -> None:
    """Raise an error where a model of our own is not what its snapshots' config.json would say.

    A SnapshotError for other tensors, a ConfigError for a size that sample.py would not know.
    """
    if other_model(config.model) is not None:
        return
    sizes = gpt_config(config, vocab_size=1)
    check_described(layout_for(sizes))
    name, read = type(sizes).__name__, sizes.read(sizes.config_json())
    lost = [
        entry
        for entry, value in vars(sizes).items()
        if entry not in OF_TRAINING and getattr(read, entry, None) != value
    ]
    if lost:
        raise ConfigError(
            f"{name}.read does not know {', '.join(lost)} from what {name}.config_json writes: "
            "sample.py and evaluate.py would use another model. Write it there, and have read "
            "take it."
        )


def find_pretrained(
    accelerator: Accelerator, config: Config, start: Start
) -> PretrainedModel | None:
    """The model that `model.pretrained` or `model.architecture` names; None for one of our own.

    Of an attempt that resumes, the snapshot has the configuration and the tokenizer, so the model
    that the run began from need not be there any more. Otherwise the main process decides on the
    commit of a repo, and the first process of each machine downloads the small files. Every process
    must call this. Raises SnapshotError for what is not such a model, ConfigError for one that
    cannot train on what `data.documents` says, StoreError if the Hub cannot be reached.
    """
    if (named := other_model(config.model)) is None:
        return None
    key, value = named
    if start.folder is not None:
        base = Base(f"{key}={value}", value, start.folder)
    else:
        found = run_on_main(accelerator, lambda: _open(config))
        where = decided_by_main(
            accelerator, lambda: None if found is None else found.place or found.name
        )
        base = local_main_first(accelerator, lambda: found or _open(config, where))
    if config.data.documents == MASKED:
        sizes = base.on_text(1, 1).config(dropout=0.0, activation_checkpointing=False)
        if not sizes.can_pack:
            raise ConfigError(f"{base.key}: {CANNOT_MASK}")
    settle_rate(config, base.parameters)
    return PretrainedModel(accelerator, config, base)


def _open(config: Config, where: str | None = None) -> Base:
    """Open the model that the configuration names, or `where` the main process has found it."""
    named = other_model(config.model)
    assert named is not None
    key, value = named
    is_pretrained = key == "model.pretrained"
    base = open_base(key, where or value, config.hub.timeout_seconds, is_pretrained)
    return replace(base, key=f"{key}={value}")


class PretrainedModel:
    """The model that `model.pretrained` or `model.architecture` names."""

    def __init__(self, accelerator: Accelerator, config: Config, base: Base) -> None:
        self.base = base
        self.adapters: Adapters | None = None
        """What snapshots say of the base, if they hold adapters."""
        self.stored_as = FLOAT32
        """The dtype of the base's matrices in its files, one of `model.frozen.DTYPES`."""
        self._accelerator, self._config = accelerator, config
        self.has_weights = config.model.pretrained is not None
        self.weights: Path | None = None
        """Where the base's weights are, if they are needed."""
        self._base_config: dict[str, Any] | None = None
        self._base_digest: str | None = None

    def build(self, start: Start, tokenizer: Tokenizer) -> LanguageModel:
        """Build the model of `base`, or that of the snapshot which the run resumes from.

        Every process must call this. The parameters have no values, and take no memory before they
        are sharded. Raises ConfigError, DataError, SnapshotError and StoreError.
        """
        accelerator, base, keys = self._accelerator, self.base, self._config.model
        kept = keys.frozen_dtype if start.state is None else start.state.frozen_dtype
        if kept == NF4:  # of a snapshot; a configuration that asks for it was refused before
            refuse_nf4(accelerator)
        context, end = self._config.data.block_size, tokenizer.end_of_text
        base = base.on_text(tokenizer.vocab_size, context, end)
        sizes = base.config(keys.dropout, keys.activation_checkpointing)
        if self._config.data.block_size > sizes.block_size:
            raise ConfigError(too_long(self._config, base.key, sizes.block_size))
        refuse_larger_than(sizes.vocab_size, tokenizer, str(self._config.data.tokenizer))
        if start.folder is None and self.has_weights:
            here = accelerator.is_local_main_process
            self.weights = local_main_first(accelerator, lambda: base.fetch_weights(here))
            run_on_main(accelerator, lambda: check_weights(base, sizes))
        check_described(layout_for(sizes))
        try:
            model = build_empty(replace(sizes, lora=lora_of(keys)))
        except LoraError as error:
            raise ConfigError(str(error)) from error
        if (lora := model.config.lora) is not None:
            if start.folder is None or start.state is None:
                self.adapters = self._name_base(lora, model)
            else:
                self.adapters = self._find_base(lora, start.folder, start.state)
        if (weights := self.weights) is not None:
            self.stored_as = decided_by_main(accelerator, lambda: _dtype_in(weights))
        return model

    def _name_base(self, lora: Lora, model: LanguageModel) -> Adapters:
        """What the snapshots of a new run say of the base that it trains adapters around."""
        folder, content = self.base.folder, model.config.config_json()
        self._base_config = content
        self._base_digest = run_on_main(self._accelerator, lambda: digest_of(folder))
        name, commit = self.base.published or (str(folder.absolute()), None)
        return Adapters(lora, self._public(name), commit, content.get("model_type") == GPT2)

    def _find_base(self, lora: Lora, place: Path, state: RunState) -> Adapters:
        """Find the base of the adapters in a snapshot, whose weights `fill_weights` reads."""
        held, here = read_adapters(place), self._accelerator.is_local_main_process
        assert held is not None, "check_snapshot has found them"
        self._base_config, self._base_digest = state.base_config, state.base_digest
        timeout, named = self._config.hub.timeout_seconds, self._config.model.pretrained

        def find() -> Path:
            found = open_base_of(held, state.base_digest, place, timeout, named)
            return found.fetch_weights(here)

        self.weights = local_main_first(self._accelerator, find)
        is_folder = held.revision is None and "://" not in held.base
        name = str(self.weights.absolute()) if is_folder else held.base
        return replace(held, lora=lora, base=self._public(name))

    def _public(self, name: str) -> str:
        """The name of a base in snapshots; others may read those that are uploaded."""
        return name if self._config.hub.store_url is None else public_name(name)

    def note_base(self, state: RunState) -> None:
        """Have the run's state say what the base of its adapters is."""
        state.base_config, state.base_digest = self._base_config, self._base_digest


def refuse_nf4(accelerator: Accelerator) -> None:
    """Raise ConfigError where weights in four bits are not possible."""
    try:
        refuse_without_kernels()
    except FrozenError as error:
        raise ConfigError(str(error)) from error
    precision = accelerator.mixed_precision
    if precision not in ("no", "bf16") and (accelerator.is_fsdp2 or precision != "fp16"):
        where = " under FSDP" if accelerator.is_fsdp2 else ""
        raise ConfigError(
            f"model.frozen_dtype={NF4} is not supported in {precision}{where}, which casts "
            "the packed weights. Set mixed_precision: bf16 in the accelerate config file."
        )


def _dtype_in(weights: Path) -> str:
    """The dtype of `model.frozen.DTYPES` that holds each number of the matrices in files."""
    with TensorReader(weights, WHOLE) as reader:
        found = reader.dtypes()
    return IN_FILES.get(found.pop(), FLOAT32) if len(found) == 1 else FLOAT32


def choose_frozen_dtype(
    config: Config, state: RunState, pretrained: PretrainedModel | None, model: LanguageModel
) -> None:
    """Keep what is not trained as `model.frozen_dtype` says, and note that in the run's state.

    A run that resumes keeps what it began with. Raises ConfigError.
    """
    if all(parameter.requires_grad for parameter in model.parameters()):
        return
    stored_as = FLOAT32 if pretrained is None else pretrained.stored_as
    if config.model.frozen_dtype != AUTO:
        state.frozen_dtype = config.model.frozen_dtype
    elif state.frozen_dtype is None:
        state.frozen_dtype = stored_as
    try:
        keep_frozen(model, state.frozen_dtype, stored_as, filled=False)
    except FrozenError as error:
        raise ConfigError(str(error)) from error


def fill_weights(
    accelerator: Accelerator,
    pretrained: PretrainedModel | None,
    start: Start,
    model: LanguageModel,
    optimizer: Optimizer,
    seed: int,
) -> None:
    """Read weights and optimizer state of the snapshot, or those of a base, or draw new ones.

    Model and optimizer are prepared; each process fills its shard alone. Adapters on a base are
    new. Every process must call this. Raises SnapshotError.
    """
    base = None if pretrained is None else pretrained.weights
    if base is not None:
        run_on_all(accelerator, lambda: restore_weights(base, model))
    if (folder := start.folder) is not None:
        run_on_all(accelerator, lambda: restore(folder, model, optimizer))
        assert start.state is not None
        if accelerator.scaler is not None and start.state.loss_scaler is not None:
            accelerator.scaler.load_state_dict(start.state.loss_scaler)
    else:

        def draw() -> None:
            with model_errors("The model "):
                model.draw_new_weights(seed, adapters_only=base is not None)

        run_on_all(accelerator, draw)


def generation(pretrained: PretrainedModel | None, corpus: Corpus) -> dict[str, Any]:
    """The generation_config.json of the run's snapshots; empty if they have none.

    It is that of the model which the run began from. Where the run trains on conversations, it ends
    a text where their template ends a reply, too.
    """
    stops: frozenset[int] = frozenset()
    if corpus.marks:
        stops = ChatTemplate(corpus.tokenizer, corpus.info.name).stops()
    return generation_settings(None if pretrained is None else pretrained.base.folder, stops)
