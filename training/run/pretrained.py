"""The model of the Hub or of a folder that a run trains, if it names one, on every machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.optim import Optimizer

from config.schema import Config, ConfigError, lora_of, other_model, too_long
from data.chat import ChatTemplate
from data.columns import MASKED
from data.corpus import Corpus
from data.loader import CANNOT_MASK
from data.public_names import public_name
from data.tokenizer import Tokenizer, refuse_larger_than
from data.tokenizer_files import generation_settings
from model.families import build_empty, build_without_memory
from model.family import LanguageModel
from model.frozen import AUTO, FLOAT32, NF4, keep_frozen, refuse_without_kernels
from model.gpt import GPT2
from model.layout import ModelError
from model.lora import Lora
from model.new_weights import draw
from snapshot.disk.checking import check_weights
from snapshot.disk.load import TensorReader, digest_of, restore, restore_weights
from snapshot.disk.model import WHOLE, Adapters, model_errors, read_adapters
from snapshot.disk.state import RunState
from snapshot.named_model import NamedModel, open_base, open_base_of
from snapshot.start import Start
from training.distributed.processes import (
    decided_by_main,
    local_main_first,
    run_on_all,
    run_on_main,
)

IN_FILES = {"BF16": "bf16", "F16": "fp16"}
"""`model.frozen_dtype` by safetensors' name of a dtype that it holds without loss."""


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
    timeout, has_weights = config.hub.timeout_seconds, key == "model.pretrained"
    on_main: list[NamedModel] = []

    def choose() -> str:
        on_main.append(open_base(key, value, timeout, has_weights))
        return on_main[0].place or on_main[0].name

    def open_here() -> NamedModel:
        return on_main[0] if on_main else open_base(key, chosen, timeout, has_weights)

    if start.folder is not None:
        base = NamedModel(f"{key}={value}", start.folder)
    else:
        chosen = decided_by_main(accelerator, choose)
        base = replace(local_main_first(accelerator, open_here), key=f"{key}={value}")
    # A model that cannot be built here is refused before the text is prepared.
    sizes = base.on_text(1, 1).config(dropout=0.0, activation_checkpointing=False)
    if config.data.documents == MASKED and not sizes.can_pack:
        raise ConfigError(f"{base.key}: {CANNOT_MASK}")
    if config.model.lora_rank is not None and start.folder is None and "://" in base.published[0]:
        raise ConfigError(  # what is there may change, and a resume could not tell
            f"{base.key}: adapters need a base in a folder or in a repo of the Hub. Download it, "
            "and name its folder."
        )
    return PretrainedModel(accelerator, config, base)


class PretrainedModel:
    """The model that `model.pretrained` or `model.architecture` names."""

    def __init__(self, accelerator: Accelerator, config: Config, base: NamedModel) -> None:
        self.base = base
        self.adapters: Adapters | None = None
        """What snapshots say of the base, if they hold adapters."""
        self.weights: Path | None = None
        """Where the base's weights are, if they are needed."""
        self.stored_as = FLOAT32
        """The dtype of the base's matrices in its files, one of `model.frozen.DTYPES`."""
        self._accelerator, self._config = accelerator, config

    def build(self, start: Start, state: RunState, tokenizer: Tokenizer) -> LanguageModel:
        """Build the model of `base`, or that of the snapshot which the run resumes from.

        `state` gets what snapshots say of the base of adapters. The parameters have no values, and
        take no memory before they are sharded. Every process must call this. Raises any of
        `USER_MISTAKES`.
        """
        accelerator, base, keys = self._accelerator, self.base, self._config.model
        if state.frozen_dtype == NF4:  # of a snapshot; what the configuration asks for is checked
            refuse_nf4(accelerator)
        context, end = self._config.data.block_size, tokenizer.end_of_text
        base = base.on_text(tokenizer.vocab_size, context, end)
        sizes = base.config(keys.dropout, keys.activation_checkpointing)
        if context > sizes.block_size:
            raise ConfigError(too_long(self._config, base.key, sizes.block_size))
        refuse_larger_than(sizes.vocab_size, tokenizer, str(self._config.data.tokenizer))
        if start.folder is None and keys.pretrained is not None:
            here = accelerator.is_local_main_process
            self.weights = local_main_first(accelerator, lambda: base.fetch_weights(here))
            run_on_main(accelerator, lambda: check_weights(base.folder, base.key, sizes))
        try:
            model = build_empty(replace(sizes, lora=lora_of(keys)))
        except ModelError as error:
            raise ConfigError(f"{base.key} {error}") from error
        if (lora := model.config.lora) is not None:
            if start.folder is None:
                self.adapters = self._name_base(lora, model, state)
            else:
                self.adapters = self._find_base(lora, start.folder, state)
        if (weights := self.weights) is not None:
            self.stored_as = decided_by_main(accelerator, lambda: _dtype_in(weights))
        return model

    def _name_base(self, lora: Lora, model: LanguageModel, state: RunState) -> Adapters:
        """What the snapshots of a new run say of the base that it trains adapters around."""
        folder, content = self.base.folder, model.config.config_json()
        state.base_config = content
        state.base_digest = run_on_main(self._accelerator, lambda: digest_of(folder))
        name, commit = self.base.published
        return Adapters(lora, self._public(name), commit, content.get("model_type") == GPT2)

    def _find_base(self, lora: Lora, snapshot: Path, state: RunState) -> Adapters:
        """Find the base of the adapters in a snapshot, whose weights `fill_weights` reads."""
        stored, here = read_adapters(snapshot), self._accelerator.is_local_main_process
        assert stored is not None, "check_snapshot has found them"
        timeout, named = self._config.hub.timeout_seconds, self._config.model.pretrained

        def fetch() -> Path:
            base = open_base_of(stored, state.base_digest, snapshot, timeout, named)
            return base.fetch_weights(here)

        self.weights = local_main_first(self._accelerator, fetch)
        is_folder = stored.revision is None and "://" not in stored.base
        name = str(self.weights.absolute()) if is_folder else stored.base
        return replace(stored, lora=lora, base=self._public(name))

    def _public(self, name: str) -> str:
        """The name of a base in snapshots; others may read those that are uploaded."""
        return name if self._config.hub.store_url is None else public_name(name)


def refuse_nf4(accelerator: Accelerator) -> None:
    """Raise FrozenError or ConfigError where weights in four bits are not possible."""
    refuse_without_kernels()
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
        dtypes = reader.dtypes()
    return IN_FILES.get(dtypes.pop(), FLOAT32) if len(dtypes) == 1 else FLOAT32


def choose_frozen_dtype(
    config: Config, state: RunState, pretrained: PretrainedModel | None, model: LanguageModel
) -> None:
    """Keep what is not trained as `model.frozen_dtype` says, and note that in the run's state.

    A run that resumes keeps what it began with. Raises FrozenError.
    """
    if all(parameter.requires_grad for parameter in model.parameters()):
        return
    stored_as = FLOAT32 if pretrained is None else pretrained.stored_as
    if config.model.frozen_dtype != AUTO:
        state.frozen_dtype = config.model.frozen_dtype
    elif state.frozen_dtype is None:
        state.frozen_dtype = stored_as
    keep_frozen(model, state.frozen_dtype, stored_as, filled=False)


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
    base, folder = None if pretrained is None else pretrained.weights, start.folder

    def fill() -> None:
        if base is not None:
            restore_weights(base, model)
        if folder is not None:
            restore(folder, model, optimizer)
            return
        with model_errors("The model "):
            template = build_without_memory(model.config)
            draw(model, template, seed, adapters_only=base is not None)

    run_on_all(accelerator, fill)
    if start.state is not None and start.state.loss_scaler and accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(start.state.loss_scaler)


def generation(pretrained: PretrainedModel | None, corpus: Corpus) -> dict[str, Any]:
    """The generation_config.json of the run's snapshots; empty if they have none.

    It is that of the model which the run began from. Where the run trains on conversations, it ends
    a text where their template ends a reply, too.
    """
    stops: frozenset[int] = frozenset()
    if corpus.marks:
        stops = ChatTemplate(corpus.tokenizer, corpus.info.name).stops()
    return generation_settings(None if pretrained is None else pretrained.base.folder, stops)
