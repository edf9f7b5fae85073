"""The schema of the configuration: every key, its type, its default and its meaning.

Hydra fills it from `config/` and the command line (`config/compose.py`). Processes, machines,
precision, sharding and compilation belong to the accelerate config file. The model's own modules
are imported by the functions that need them, because torch takes seconds and `--help` does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

if TYPE_CHECKING:
    from model.gpt import GPTConfig
    from model.lora import Lora

# The maximum of a whole number is far above any use: a larger value is a typing error that would
# exhaust the memory, overflow a clock or never end.
COUNT = (1, 10**9)
SIZE = (1, 1_000_000)
BYTES = (1_000, 10**15)
SECONDS = (0, 1_000_000)
TINY, HUGE = 1e-9, 1e100


class ConfigError(ValueError):
    """Mistakes in the configuration: sentences with key, value and remedy, one a line."""


def number(default: float | None, least: float, most: float) -> Any:
    """A key whose value, unless it is null, is at least `least` and at most `most`."""
    return field(default=default, metadata={"range": (least, most)})


@dataclass
class MixPart:
    source: str = MISSING
    """A source like data.source, always streamed."""
    weight: float = 1.0
    """Its share of the training blocks, relative to the other weights."""
    text_column: str | None = None
    """The column that holds the text; null: data.text_column."""


@dataclass
class DataConfig:
    source: str = "python-docs"
    """The text: python-docs, python-stdlib, a path or glob, a URL, or a Hub data set id."""
    text_column: str = "text"
    """The column with the text or the messages, in tables and Hub data sets."""
    val_fraction: float = number(0.1, TINY, 0.5)
    """The fraction at the end of the text that is held out for evaluation (validation)."""
    tokenizer: str | None = None
    """char, bpe:8000, or a repo or folder with one; null: that of model.pretrained, or char."""
    documents: str = "packed"
    """packed or masked: windows of a stream; conversations: rows of whole conversations."""
    block_size: int = number(64, *SIZE)
    """Context length, in tokens."""
    cache_dir: str = "out/data"
    """The folder for prepared texts."""
    streaming: bool | None = None
    """Read the text during training; null: with data.mix."""
    mix: list[MixPart] = field(default_factory=list)
    """Streamed sources instead of data.source: [{source:a,weight:0.7},{source:b,weight:0.3}]."""
    window_bytes: int = number(32_000_000, *BYTES)
    """Bytes of text that are shuffled at once, per streamed source."""
    stream_cache_bytes: int = number(4_000_000_000, *BYTES)
    """Maximum size in bytes of the cached tokens of streamed text in data.cache_dir."""
    held_out_bytes: int = number(2_000_000, *BYTES)
    """Bytes of held-out rows of a streamed text that are evaluated."""
    held_out_split: str | None = None
    """The split of streamed Hub data sets to evaluate on (validation, ...); null: val_fraction."""
    skip_broken: bool = False
    """Skip unreadable rows and groups of a streamed text, and report them."""

    @property
    def sources(self) -> list[MixPart]:
        """The sources of a streamed text."""
        return self.mix or [MixPart(self.source)]


@dataclass
class ModelConfig:
    pretrained: str | None = None
    """The model to start from: a Hub repo (owner/name[@revision]), a folder, a run; null: none."""
    architecture: str | None = None
    """A repo or folder whose config.json to train from random weights; null: our GPT-2."""
    n_layer: int = number(4, 1, 10_000)
    """Transformer blocks."""
    n_head: int = number(4, 1, 10_000)
    """Attention heads per block."""
    n_embd: int = number(128, *SIZE)
    """Width: channels of the residual stream, a multiple of n_head."""
    dropout: float = number(0.0, 0, 0.99)
    """Dropout probability, wherever the model has dropout; use 0 for short runs."""
    activation_function: str = "gelu_new"
    """GPT-2: gelu_new (its own) or gelu (exact, and much faster on a CPU)."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, about a third more work."""
    lora_rank: int | None = number(None, 1, 65_536)
    """Freeze model.pretrained and train LoRA adapters of this rank; null: train the model."""
    lora_alpha: int | None = number(None, 1, 65_536)
    """The output of adapters is scaled by lora_alpha / lora_rank; null: by 2."""
    lora_targets: list[str] = field(default_factory=list)
    """Linear layers that get adapters, such as [q_proj,v_proj]; by default all in the blocks."""
    frozen_dtype: str = "auto"
    """Frozen weights: float32, bf16, fp16, nf4 (QLoRA); auto: 16 bits if the base has them."""


@dataclass
class OptimConfig:
    learning_rate: float = number(1e-3, 0, HUGE)
    """The peak learning rate, after the warm-up."""
    min_learning_rate: float = number(1e-4, 0, HUGE)
    """The learning rate of the last step."""
    warmup_steps: int = number(100, 0, 10**9)
    """Steps in which the learning rate rises linearly from 0."""
    schedule: str = "cosine"
    """After the warm-up: cosine decays over all steps; wsd is stable and decays at the end."""
    decay_fraction: float = number(0.2, TINY, 1)
    """wsd: the fraction of train.max_steps, at their end, in which the learning rate decays."""
    weight_decay: float = number(0.1, 0, HUGE)
    """Decoupled weight decay of matrices and embeddings; biases and norms have none."""
    name: str = "adamw"
    """adamw; or muon for the matrices of the blocks, with AdamW for all other parameters."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    """AdamW's decay rates for the averages of gradient and squared gradient."""
    freeze: list[str] = field(default_factory=list)
    """Patterns of parameters that are not trained, such as ['*.wte.*','*.h.0.*']."""
    max_grad_norm: float = number(1.0, TINY, math.inf)
    """Gradients with a larger global norm are scaled down to this one."""


@dataclass
class TrainConfig:
    max_steps: int = number(2000, *COUNT)
    """Optimizer updates of the whole run; raise it to extend a finished run."""
    global_batch_size: int = number(12, *SIZE)
    """Sequences of one step, over all processes and accumulation."""
    micro_batch_size: int | None = number(None, *SIZE)
    """Most sequences per process in one forward pass; null: its whole share of the global batch."""
    eval_every: int = number(250, *COUNT)
    """Steps between evaluations; there is always one at the end."""
    eval_batches: int | None = number(75, *COUNT)
    """Global batches per evaluation, at most; null: all; by default a tenth of the steps' work."""
    log_every: int = number(20, *COUNT)
    """Steps between lines on the console; metrics.jsonl has every step."""
    sample_every: int = number(500, 0, 10**9)
    """Steps between printed samples, of 20 seconds at most; 0: none, not even at the end."""
    max_skipped_steps: int = number(20, 0, 10**9)
    """Updates in a row that fp16's loss scaler may skip before the run stops."""
    seed: int = number(1337, 0, 2**32 - 1)
    """Seed of the initial weights, the data order and dropout."""


@dataclass
class SnapshotConfig:
    every: int = number(250, *COUNT)
    """Steps between snapshots; there is always one at the end."""
    every_minutes: float | None = number(None, TINY, 1_000_000)
    """Minutes between snapshots instead; null: snapshot.every."""
    keep: int = number(3, 2, 1_000_000)
    """Number of newest snapshots to keep on disk, at least 2."""
    keep_best: bool = False
    """Also keep the snapshot with the lowest held-out loss, here and in the store."""
    resume: str = "auto"
    """auto: this run's newest, or another run's folder or repo[@revision]."""
    piece_bytes: int = number(2_000_000_000, 1_000_000, 10**15)
    """Maximum size in bytes of a snapshot's shard files; larger models are split into several."""


@dataclass
class HubConfig:
    repo_id: str | None = None
    """The Hub repo (owner/name) to upload snapshots to and resume from; null: none."""
    url: str | None = None
    """A folder elsewhere instead: s3://bucket/run, gs://..., file:///shared/run: docs/hub.md."""
    private: bool = True
    """Create the repo as private, and refuse a public one."""
    keep: int = number(3, *SIZE)
    """Number of newest snapshots to keep in the repo."""
    min_interval_seconds: float = number(60.0, *SECONDS)
    """Minimum time between two uploads, because the Hub limits commits per hour."""
    milestone_every: int | None = number(None, *COUNT)
    """Steps between snapshots that are kept for good; null: none."""
    takeover: bool = False
    """Take the store over from another run, which then stops uploading."""
    timeout_seconds: float = number(60.0, TINY, 1_000_000)
    """Timeout of a request to the Hub."""
    license: str | None = None
    """License on the model card, as the Hub names it (mit, apache-2.0, cc-by-4.0, ...)."""
    language: str | None = None
    """Language of the text on the model card, as a code (en, de, code, ...)."""
    flush_seconds: float = number(240.0, *SECONDS)
    """How long the end of a run waits for its last upload; the next start uploads the rest."""

    @property
    def store_url(self) -> str | None:
        """The URL of the store; null: none. `repo_id` is a short form of it."""
        if self.url is not None or self.repo_id is None:
            return self.url
        return f"hf://{self.repo_id}"


@dataclass
class RunConfig:
    name: str = "${data_name:${data.source},${data.mix}}"
    """Name of the run; by default derived from data.source or data.mix."""
    dir: str = "out/${run.name}"
    """Directory of everything that the run writes."""
    tracker: list[str] | None = None
    """Trackers of accelerate to report to (tensorboard, trackio, wandb, ...); null: none."""
    project: str = "accelerate-gpt"
    """Project name in the trackers."""
    max_minutes: float | None = number(None, TINY, 10**7)
    """Stop with a snapshot within this many minutes of the start; null: no limit."""
    grace_seconds: float = number(25.0, 1, 1_000_000)
    """Time that a stop may take: to finish the step, save it and upload it."""
    collective_timeout_seconds: int = number(180, 1, 1_000_000)
    """Process-group timeout within a step; an unreachable process then ends the run."""
    start_timeout_seconds: int = number(3600, 1, 1_000_000)
    """Process-group timeout at the start and around snapshots, where processes wait for one."""
    sync_each_micro_batch: bool = True
    """FSDP: send in each micro-batch; false: once a step, with whole weights and gradients."""


@dataclass
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    run: RunConfig = field(default_factory=RunConfig)


FIELDS = {
    f"{section.name}.{entry.name}": entry
    for section in fields(Config)
    for entry in fields(getattr(Config(), section.name))
}
"""Every key in the form of the command line."""
KEYS = {key: str(entry.type) for key, entry in FIELDS.items()}
"""Every key, with its type."""
RANGES = {key: entry.metadata["range"] for key, entry in FIELDS.items() if entry.metadata}
"""The least and the most of each number."""
TEXT_KEYS = tuple(key for key, type_ in KEYS.items() if type_.startswith("str"))
"""The keys whose value is a text, or possibly null."""


def gpt_config(config: Config, vocab_size: int) -> GPTConfig:
    """The sizes of our own model for a vocabulary. Raises ValueError for impossible ones."""
    from model.gpt import GPTConfig

    known = {entry.name for entry in fields(GPTConfig)}
    sizes = {key: value for key, value in vars(config.model).items() if key in known}
    return GPTConfig(vocab_size, config.data.block_size, **sizes)


def lora_of(model: ModelConfig) -> Lora | None:
    """The adapters that are trained, if any."""
    from model.lora import Lora

    if model.lora_rank is None:
        return None
    alpha = model.lora_alpha or 2 * model.lora_rank
    return Lora(model.lora_rank, alpha, tuple(model.lora_targets), model.dropout)


def other_model(model: ModelConfig) -> tuple[str, str] | None:
    """Key and value that name another model than our own; None for ours."""
    if model.pretrained is not None:
        return "model.pretrained", model.pretrained
    return None if model.architecture is None else ("model.architecture", model.architecture)


def is_preset(model: ModelConfig) -> bool:
    """Whether a preset of `model=` names the other model, with the config.json of this project."""
    from model.families import ARCHITECTURES

    return model.pretrained is None and model.architecture in ARCHITECTURES


def is_streamed(data: DataConfig) -> bool:
    """Whether the text is read during training instead of before it."""
    return bool(data.streaming or data.mix)


def tokenizer_of(model: ModelConfig) -> str:
    """The default of `data.tokenizer`: that of the model, if it brings one."""
    from data.tokenizer import CHARACTERS

    other = other_model(model)
    return CHARACTERS if other is None or is_preset(model) else other[1]


def too_long(config: Config, model: str, context: int) -> str:
    """The mistake of windows that are longer than a model's context."""
    return (
        f"data.block_size={config.data.block_size} is longer than the context of {model}, "
        f"{context} tokens. Use at most that."
    )


def multiples_near(number: int, of: int) -> str:
    """The nearest multiples of a number, for a sentence."""
    near = {max(1, number // of) * of, (number // of + 1) * of}
    return " or ".join(map(str, sorted(near)))


def refuse_uneven_chunks(config: Config, processes: int) -> None:
    """Raise ConfigError if so many processes cannot share a sequence equally."""
    length = config.data.block_size
    if length % processes:
        who = "the processes that share each sequence in equal chunks (parallelism_config_cp_size)"
        what = f"data.block_size={length} is not a multiple of {processes}, {who}"
        raise ConfigError(f"{what}. Use {multiples_near(length, processes)}.")
