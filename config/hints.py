"""Suggestions for mistakes: the key for another name, the argument that Hydra accepts."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence

ALIASES = {
    "optim.learning_rate": "lr max_lr",
    "optim.min_learning_rate": "min_lr",
    "optim.warmup_steps": "warmup warmup_iters num_warmup_steps",
    "optim.name": "optimizer optimiser optim_name",
    "optim.schedule": "scheduler lr_scheduler lr_scheduler_type lr_schedule",
    "optim.weight_decay": "wd",
    "optim.betas": "beta1 beta2 adam_beta1 adam_beta2",
    "optim.max_grad_norm": "grad_clip clip gradient_clipping",
    "train.max_steps": "steps iters max_iters num_steps epochs max_epochs num_epochs"
    " num_train_epochs total_steps",
    "train.global_batch_size": "batch bs batch_size train_batch_size",
    "train.micro_batch_size": "device_batch_size per_device_train_batch_size"
    " gradient_accumulation_steps accumulation_steps",
    "train.eval_every": "eval_interval eval_steps val_every",
    "train.eval_batches": "eval_iters",
    "train.log_every": "log_interval logging_steps",
    "train.seed": "random_seed",
    "snapshot.every": "save_every save_steps checkpoint_every ckpt_every",
    "snapshot.keep": "save_total_limit",
    "snapshot.resume": "init_from resume_from resume_from_checkpoint checkpoint ckpt",
    "run.dir": "output output_dir out out_dir save_dir log_dir work_dir",
    "run.name": "run_name experiment_name",
    "run.tracker": "wandb tensorboard report_to wandb_log log_with",
    "run.max_minutes": "max_time time_limit",
    "hub.repo_id": "repo push_to_hub hub_model_id",
    "hub.private": "hub_private_repo",
    "data.source": "data dataset dataset_name data_path data_dir text file train_file input",
    "data.block_size": "context context_length seq_len seq_length sequence_length max_seq_len"
    " max_length n_ctx n_positions",
    "data.tokenizer": "tokenizer_name tokenizer_path vocab vocab_size bpe",
    "data.cache_dir": "cache",
    "data.documents": "packing pack sft chat conversations",
    "optim.freeze": "frozen freeze_layers",
    "model.n_layer": "layers n_layers num_layers num_hidden_layers depth",
    "model.n_head": "heads n_heads num_heads num_attention_heads",
    "model.n_embd": "hidden_size d_model dim width embed_dim n_embed embedding_size",
    "model.activation_checkpointing": "gradient_checkpointing",
    "model.activation_function": "activation",
}
"""The names of a key in other programs."""
OTHER_VALUES = (
    "epochs max_epochs num_epochs num_train_epochs gradient_accumulation_steps accumulation_steps"
    " beta1 beta2 adam_beta1 adam_beta2 vocab vocab_size bpe packing pack sft chat conversations"
    " wandb tensorboard wandb_log push_to_hub freeze_layers"
)
"""Names whose values mean something else in other programs: epochs are not steps."""
LAUNCHER_OPTIONS = (
    "num_processes num_machines machine_rank mixed_precision precision dtype bf16 fp16 device gpus"
    " gpu_ids cpu use_cpu multi_gpu use_fsdp fsdp ddp nproc_per_node world_size config_file"
    " compile dynamo_backend main_process_ip main_process_port"
)
LAUNCHER_HINT = (
    "Processes, machines, precision and compilation belong to the launcher: options of `accelerate "
    "launch`, before train.py, or entries of its config file."
)

EXPANDED = (
    "data.mix is not as you typed it: the shell has expanded its braces. Quote it: "
    "'data.mix=[{source:a,weight:0.7},{source:b,weight:0.3}]'."
)

SWEEP_OPTIONS = "multirun m"
SWEEP_HINT = (
    "For a sweep, loop in the shell and name each run: for rate in 0.001 0.003; do "
    "accelerate launch train.py optim.learning_rate=$rate run.name=rate-$rate; done."
)


def is_expanded(argument: str) -> bool:
    """Whether an argument is part of a `data.mix` whose braces a shell has expanded."""
    return re.match(r"data\.mix=\[(source|weight|text_column):[^{]*$", argument) is not None


def joined_options(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments, with `--key value` joined to `--key=value`."""
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument.startswith("-") and "=" not in argument and rest:
            follows = rest[0]
            if "=" not in follows and not re.match(r"-[a-zA-Z-]", follows):
                argument = f"{argument}={rest.pop(0)}"
        yield argument


def unknown_option(option: str, keys: Sequence[str]) -> str:
    """The mistake of an argument that begins with `-`."""
    written, has_value, value = option.partition("=")
    name = written.lstrip("-").replace("-", "_")
    known = "The options are --help and --show; everything else is key=value."
    if name.rpartition(".")[2] in LAUNCHER_OPTIONS.split():
        known = LAUNCHER_HINT
    elif name in SWEEP_OPTIONS.split():
        known = f"A run takes one value for each key. {SWEEP_HINT}"
    elif key := _key_for(name, keys):
        known = f"The key is {key}."
        if name in OTHER_VALUES.split():
            known += " It takes another value: see --help."
        elif has_value:
            known = f"Write {shlex.quote(f'{key}={value}')}."
    return f"There is no option '{written}'. {known}"


def unknown_key(key: str, keys: Sequence[str]) -> str:
    """The mistake of an unknown key, with the nearest key."""
    name = key.rpartition(".")[2]
    if name in LAUNCHER_OPTIONS.split():
        return f"There is no key '{key}'. {LAUNCHER_HINT}"
    near = _key_for(key, keys) or next(_similar(key, keys), None)
    if near is None:
        last = {known.rpartition(".")[2]: known for known in keys}
        near = next((last[match] for match in _similar(name, last, 0.5)), None)
    hint = f"The nearest key is {near}." if near else "None is similar."
    return f"There is no key '{key}'. {hint} All keys: --help."


def quoted(text: str) -> str:
    """A text in quotes of Hydra's grammar: backslashes escape only before a quote."""
    inner = re.sub(r'(\\*)"', r"\1\1" + r"\\" + '"', text)
    return '"' + re.sub(r"(\\+)$", r"\1\1", inner) + '"'


def quoted_argument(key: str, text: str, read: Callable[[str], object]) -> str | None:
    """The shell argument that Hydra parses as this text; None if there is none.

    `read` returns the value that Hydra parses from an argument; it may raise.
    """
    argument = f"{key}={quoted(text)}"
    try:
        return shlex.quote(argument) if read(argument) == text else None
    except Exception:  # many types of Hydra and OmegaConf: no suggestion
        return None


def _key_for(key: str, keys: Sequence[str]) -> str | None:
    """The key itself, the key with this name in any section, or the key with this alias."""
    name = key.rpartition(".")[2]
    if key in keys:
        return key
    same = [known for known in keys if known.rpartition(".")[2] == name]
    same += [known for known, aliases in ALIASES.items() if name in aliases.split()]
    return same[0] if same else None


def _similar(word: str, words: Iterable[str], cutoff: float = 0.6) -> Iterator[str]:
    return iter(difflib.get_close_matches(word, words, n=1, cutoff=cutoff))
