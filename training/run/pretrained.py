"""The model of the Hub or of a folder that a run trains, if it names one, on every machine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.big_modeling import init_empty_weights
from torch import nn

from config.other_models import settle_rate
from config.schema import Config, ConfigError, gpt_config, lora_of, other_model, too_long
from data.chat import ChatTemplate
from data.corpus import Corpus
from data.public_names import public_name
from data.special_tokens import end_ids
from data.tokenizer import Tokenizer, refuse_larger_than
from model.causal_lm import (
    CausalLMConfig,
    LanguageModel,
    ModelConfig,
    adapt,
    build_model,
)
from model.dropout_places import active_dropout
from model.lora import LoraError
from snapshot.base import SMALL_FILES, Base, check_weights, open_base
from snapshot.disk.architecture import config_json, layout_for, model_config
from snapshot.disk.files import snapshot_folders, snapshots_in, verify
from snapshot.disk.generation import generation_of
from snapshot.disk.reference import BaseReference, read_config, read_reference
from snapshot.disk.state import restore_weights
from snapshot.errors import SnapshotError
from snapshot.referenced_base import keep_base, open_reference
from snapshot.start import Start
from store.errors import HubError
from training.distributed.agreement import (
    broadcast_text,
    local_main_first,
    run_on_all,
    run_on_main,
)
from training.out_of_memory import check_parameters_fit


def find_pretrained(accelerator: Accelerator, config: Config) -> PretrainedModel | None:
    """The model that `model.pretrained` or `model.architecture` names; None for our own GPT.

    Every process must call this; the main process decides on the commit of a repo, and the first
    process of each machine downloads configuration and tokenizer. A run that has a snapshot needs
    nothing else, so it also resumes where the model's repo cannot be reached.

    Raises SnapshotError for what is not such a model, and where model/gpt.py is not what snapshots
    would say; HubError if the Hub cannot be reached.
    """
    if (named := other_model(config.model)) is None:
        layout_for(gpt_config(config, vocab_size=1)).refuse_undescribed()
        return None
    key, value = named
    begun = newest_begun(config)
    name = f"{key}={value}"
    found = run_on_main(accelerator, lambda: _open(key, value, config, begun))
    where = broadcast_text(accelerator, None if found is None else found.name)

    def same() -> Base:
        if found is not None:
            return found
        return replace(_open(key, where, config, newest_begun(config)), key=name)

    base = local_main_first(accelerator, same)
    settle_rate(config, partial(_parameters, base))
    return PretrainedModel(accelerator, config, base)


def _parameters(base: Base) -> int:
    sizes = base.config(dropout=0.0, activation_checkpointing=False)
    return layout_for(sizes).size_without_output()


def newest_begun(config: Config) -> Path | None:
    """The newest snapshot of this run on this disk whose configuration and tokenizer are whole."""
    if config.snapshot.resume == "never":
        return None
    with suppress(SnapshotError):
        for folder in snapshot_folders(snapshots_in(Path(config.run.dir))):
            with suppress(SnapshotError):
                verify(folder, SMALL_FILES)
                return folder
    return None


def _open(key: str, value: str, config: Config, begun: Path | None) -> Base:
    if begun is not None:
        return Base(f"{key}={value}", value, begun, is_of_run=True)
    is_pretrained = key == "model.pretrained"
    try:
        return open_base(key, value, config.hub.timeout_seconds, is_pretrained)
    except (SnapshotError, HubError):
        if config.hub.repo_id is None or config.snapshot.resume == "never":
            raise
        with suppress(SnapshotError, HubError):  # perhaps the run has begun on another machine
            own = open_base("hub.repo_id", config.hub.repo_id, config.hub.timeout_seconds, False)
            return replace(own, key=f"{key}={value}", name=value, is_of_run=True)
        raise


class PretrainedModel:
    """The model that `model.pretrained` or `model.architecture` names."""

    def __init__(self, accelerator: Accelerator, config: Config, base: Base) -> None:
        self.base = base
        self.reference: BaseReference | None = None
        """What snapshots say of the base, if they hold only what is trained."""
        self.is_untied = False
        """Whether the base's weights have an output layer that its config.json ties away."""
        self._accelerator, self._config = accelerator, config
        self._has_weights = config.model.pretrained is not None
        self._weights: Path | None = None

    def build(self, start: Start, tokenizer: Tokenizer) -> LanguageModel:
        """Build the model of `base`, or that of the snapshot which the run resumes from.

        Every process must call this. Where weights are to be read, the parameters are not
        initialised, and take no memory before they are sharded. Raises ConfigError, DataError,
        SnapshotError and HubError.
        """
        model, dropout = self._build(start, tokenizer), self._config.model.dropout
        if dropout and not active_dropout(model):
            raise ConfigError(
                f"model.dropout={dropout} has no effect: {self.base.key} ({model.config.family}) "
                "has no dropout. Leave it out."
            )
        return model

    def _build(self, start: Start, tokenizer: Tokenizer) -> LanguageModel:
        accelerator, base, keys = self._accelerator, self.base, self._config.model
        if start.folder is None:
            sizes = base.config(keys.dropout, keys.activation_checkpointing)
        else:
            described = read_config(start.folder)
            sizes = model_config(*described, keys.dropout, keys.activation_checkpointing)
        if start.folder is None and base.is_of_run:
            raise SnapshotError(
                f"{base.key} is needed to begin at step 1, and cannot be read now: the run has "
                "snapshots, but none that it resumes from. Start again when it can be read, or "
                "give the run another run.name."
            )
        if self._config.data.block_size > sizes.block_size:
            raise ConfigError(too_long(self._config, base.key, sizes.block_size))
        refuse_larger_than(sizes.vocab_size, tokenizer, str(self._config.data.tokenizer))
        if start.folder is None and self._has_weights:
            here = accelerator.is_local_main_process
            self._weights = local_main_first(accelerator, lambda: base.fetch_weights(here))
            untied = run_on_main(accelerator, lambda: str(check_weights(base, sizes)))
            self.is_untied = broadcast_text(accelerator, untied) == str(True)
            if self.is_untied:
                sizes = base.config(keys.dropout, keys.activation_checkpointing, untied=True)
        layout = layout_for(sizes)
        layout.refuse_undescribed()
        count = sum(map(torch.numel, layout.parameters().values()))
        is_new = start.folder is None and not self._has_weights
        what, optimizer = f"{base.key} needs", self._config.optim.name
        check_parameters_fit(accelerator, count, optimizer, what, created=is_new)
        if is_new:
            return build_model(sizes)
        model = _empty_model(sizes)
        if self._config.saves_only_trained:
            self._refer_to_base(start, model)
        return model

    def _refer_to_base(self, start: Start, model: LanguageModel) -> None:
        """Add the adapters, if any, and find the base of a run that saves only what it trains."""
        accelerator, keys = self._accelerator, self._config.model
        if (lora := lora_of(keys)) is not None:
            try:
                lora = lora.of(model.blocks)
                adapt(model, lora)
            except LoraError as error:
                raise ConfigError(str(error)) from error
        if start.folder is None:
            content, run_dir = config_json(model.config), Path(self._config.run.dir)

            def refer() -> BaseReference:
                return keep_base(self.base, run_dir).reference(content, lora, self._is_uploaded)

            made = run_on_main(accelerator, refer)
            # What the other processes need of it is which files they help to write.
            self.reference = made or BaseReference("", None, {}, content, lora)
            return
        place, here = start.folder, accelerator.is_local_main_process
        reference = read_reference(place)
        assert reference is not None, "check_snapshot has found it"
        timeout = self._config.hub.timeout_seconds

        def find() -> Base:
            found = open_reference(reference, place, timeout, keys.pretrained)
            found.fetch_weights(here)
            return found

        found = local_main_first(accelerator, find)
        self._weights = found.folder
        name = reference.name
        if found.repo is None:
            if self._is_uploaded:  # its snapshots do not say where it is
                run_on_main(self._accelerator, lambda: keep_base(found, Path(self._config.run.dir)))
            own = str(found.folder.absolute())
            name = public_name(name) if self._is_uploaded else own
        self.reference = replace(reference, name=name, lora=lora)

    @property
    def _is_uploaded(self) -> bool:
        """Whether others may read the run's snapshots, which then say no folder of this machine."""
        return (self._config.hub.repo_id or self._config.hub.bucket) is not None

    def load(self, model: LanguageModel) -> None:
        """Read the base's weights, if they are needed, into a prepared model. All call this.

        Raises SnapshotError.
        """
        if (weights := self._weights) is not None:
            run_on_all(self._accelerator, lambda: restore_weights(weights, model))


def generation(pretrained: PretrainedModel | None, corpus: Corpus) -> dict[str, Any]:
    """The generation_config.json of the run's snapshots; empty if they have none.

    It is that of the model which the run began from. Where the run trains on conversations, it ends
    a text where their template ends a reply, too.
    """
    stops: frozenset[int] = frozenset()
    if corpus.marks:
        stops = ChatTemplate(corpus.tokenizer, corpus.info.name).stops()
    return generation_of(None if pretrained is None else pretrained.base.folder, stops)


def ends_of(pretrained: PretrainedModel | None) -> frozenset[int]:
    """The tokens that end a text of the model which the run began from, as in transformers."""
    return frozenset() if pretrained is None else frozenset(end_ids(pretrained.base.folder))


def _empty_model(sizes: ModelConfig) -> LanguageModel:
    """A model whose parameters have no values; the system gives them memory when they are written.

    Buffers, which are constants, have their values.
    """
    skip_init: AbstractContextManager[None] = nullcontext()
    if isinstance(sizes, CausalLMConfig):
        from transformers.initialization import no_init_weights

        skip_init = no_init_weights()
    with skip_init, init_empty_weights(include_buffers=False):
        model = build_model(sizes)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty_like(parameter, device="cpu")
            setattr(module, name, nn.Parameter(empty, parameter.requires_grad))
    model.tie_weights()
    return model
