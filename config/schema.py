"""The schema of the configuration: every key, its type, its default and its meaning.

Hydra fills it from `config/` and the command line (see `config/compose.py`). What belongs to the
machine (processes, machines, precision, sharding, compile) is not here: the accelerate config file
owns it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields


class ConfigError(ValueError):
    """Mistakes in the configuration: sentences that name key, value and remedy, one a line."""


@dataclass
class DataConfig:
    source: str = "python-docs"
    """The text: python-docs, python-stdlib, a path or glob, a URL, or a Hub data set id."""
    text_column: str = "text"
    """The column that holds the text, in tables and Hub data sets."""
    val_fraction: float = 0.1
    """The share of the text, at its end, that is held out for evaluation."""
    block_size: int = 64
    """Context length, in characters."""
    cache_dir: str = "out/data"
    """Where prepared texts are kept."""
    num_workers: int = 0
    """Worker processes that read batches; 0 reads in the training process."""


@dataclass
class ModelConfig:
    n_layer: int = 4
    """Transformer blocks."""
    n_head: int = 4
    """Attention heads of each block."""
    n_embd: int = 128
    """Width: channels of the residual stream, a multiple of n_head."""
    dropout: float = 0.0
    """Probability of dropping, at GPT-2's places; 0 for short runs."""
    activation_function: str = "gelu_new"
    """gelu_new, as GPT-2 has it, or gelu, the exact one, which a CPU computes much faster."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more work."""


@dataclass
class OptimConfig:
    learning_rate: float = 1e-3
    """The highest, reached after the warm-up."""
    min_learning_rate: float = 1e-4
    """The last step's, at the end of the cosine."""
    warmup_steps: int = 100
    """Steps of linear increase from 0."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices and embeddings; biases and norms have none."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    """AdamW's averaging constants of gradient and squared gradient."""
    max_grad_norm: float = 1.0
    """Gradients of a larger global norm are scaled down to it."""


@dataclass
class TrainConfig:
    max_steps: int = 2000
    """Optimizer updates of the whole run; a finished run is extended by raising it."""
    global_batch_size: int = 12
    """Sequences of one step, over all processes and accumulation."""
    micro_batch_size: int | None = None
    """Sequences one process feeds forward at once; null: its whole share of the global batch."""
    eval_every: int = 250
    """Steps between evaluations; there is always one at the end."""
    eval_batches: int | None = 200
    """Evaluate on at most this many global batches of held-out text; null: on all of it."""
    log_every: int = 20
    """Steps between lines on the console; metrics.jsonl has every step."""
    sample_every: int = 500
    """Steps between printed samples; 0: only at the end."""
    max_skipped_steps: int = 20
    """How many updates in a row fp16's loss scaler may leave out before the run stops."""
    seed: int = 1337
    """Decides weights, order and dropout."""


@dataclass
class SnapshotConfig:
    every: int = 250
    """Steps between snapshots; there is always one at the end."""
    keep: int = 3
    """How many of the newest are kept, at least 2."""
    resume: str = "auto"
    """auto: from this run's newest; never: start over; or another's folder or repo[@revision]."""
    piece_bytes: int = 2_000_000_000
    """The largest file of a snapshot; larger models are split into several."""


@dataclass
class HubConfig:
    repo_id: str | None = None
    """The Hub repo (owner/name) that snapshots are uploaded to and resumed from; null: none."""
    private: bool = True
    """The repo is made private, and a public one is refused."""
    keep: int = 3
    """How many of the newest snapshots the repo keeps."""
    min_interval_seconds: float = 60.0
    """Seconds between two uploads, because the Hub limits commits per hour; the newest one wins."""
    squash_every: int = 10
    """Commits after which the repo's history is forgotten, so that its storage stays bounded."""
    takeover: bool = False
    """Upload although another run or attempt has the repo; that one then stops uploading."""
    timeout_seconds: float = 60.0
    """Seconds without an answer after which a request is given up."""
    flush_seconds: float = 240.0
    """How long the end of a run waits for its last upload; the rest goes at the next start."""


@dataclass
class RunConfig:
    name: str = "${data_name:${data.source}}"
    """The run's name; by default it is made from data.source."""
    dir: str = "out/${run.name}"
    """Everything the run writes."""
    tracker: str | None = None
    """A tracker of accelerate's to report to as well (tensorboard, wandb, ...); null: none."""
    max_minutes: float | None = None
    """Stop with a snapshot before so many minutes since the launch are over; null: no limit."""
    grace_seconds: float = 25.0
    """How long a run that is told to stop may take: to finish its step, save it and upload it."""
    collective_timeout_seconds: int = 180
    """How long a process waits in a step for the others, one of which may be gone."""
    start_timeout_seconds: int = 3600
    """The same before the first step and around a snapshot, where one works and the others wait."""
    emulate_bf16: bool = False
    """Compute in bf16 also on a CPU without bf16 instructions; false: in float32 there."""
    compile_short_runs: bool = False
    """Compile as the accelerate config file says also where it takes longer than it saves."""


@dataclass
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    run: RunConfig = field(default_factory=RunConfig)


TEXT_KEYS = tuple(
    f"{section.name}.{entry.name}"
    for section in fields(Config)
    for entry in fields(getattr(Config(), section.name))
    if str(entry.type).startswith("str")
)
"""The keys whose value is a text, some of them perhaps null."""


def accumulation_steps(train: TrainConfig, processes: int) -> int:
    """Micro-batches that each process takes in a step.

    Raises ConfigError that names the nearest sizes which work, when the global batch cannot be
    shared.
    """
    size, micro = train.global_batch_size, train.micro_batch_size
    if micro is None:
        if size % processes:
            near = " or ".join(str(n) for n in _nearest_multiples(size, processes))
            raise ConfigError(
                f"train.global_batch_size={size} cannot be shared equally by {processes} "
                f"processes. The nearest that can: {near}."
            )
        return 1
    together = micro * processes
    if size % together:
        near = " or ".join(str(n) for n in _nearest_multiples(size, together))
        dividing = [m for m in range(1, size + 1) if size % (m * processes) == 0]
        below, above = [m for m in dividing if m < micro], [m for m in dividing if m > micro]
        around = " or ".join(str(m) for m in [*below[-1:], *above[:1]])
        instead = f", or for this global batch train.micro_batch_size={around}" if around else ""
        raise ConfigError(
            f"train.global_batch_size={size} is not a multiple of train.micro_batch_size={micro} "
            f"times {processes} process{'es' if processes > 1 else ''}, {together}. "
            f"The nearest that is: {near}{instead}."
        )
    return size // together


def _nearest_multiples(size: int, of: int) -> list[int]:
    below = size // of * of
    return [n for n in (below, below + of) if n > 0]
