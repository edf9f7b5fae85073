"""What was probably meant: the key behind another name for it, the argument that Hydra takes."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence

ALIASES = {
    "optim.learning_rate": "lr max_lr",
    "optim.min_learning_rate": "min_lr",
    "optim.warmup_steps": "warmup warmup_iters num_warmup_steps",
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
    "data.num_workers": "workers dataloader_num_workers",
    "data.cache_dir": "cache",
    "model.n_layer": "layers n_layers num_layers num_hidden_layers depth",
    "model.n_head": "heads n_heads num_heads num_attention_heads",
    "model.n_embd": "hidden_size d_model dim width embed_dim n_embed embedding_size",
    "model.activation_checkpointing": "gradient_checkpointing",
    "model.activation_function": "activation",
}
"""By key, the names that other programs have for it."""
OF_THE_LAUNCHER = (
    "num_processes num_machines machine_rank mixed_precision precision dtype bf16 fp16 device gpus"
    " gpu_ids cpu use_cpu multi_gpu use_fsdp fsdp ddp nproc_per_node world_size config_file"
    " compile dynamo_backend main_process_ip main_process_port"
)
LAUNCHER = (
    "Processes, machines, precision and compiling are the launcher's: options of `accelerate "
    "launch`, before train.py, or entries of its config file."
)


def joined_options(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments, those of the form `--key value` as one, `--key=value`."""
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument.startswith("-") and "=" not in argument and rest:
            follows = rest[0]
            if "=" not in follows and not re.match(r"-[a-zA-Z-]", follows):
                argument = f"{argument}={rest.pop(0)}"
        yield argument


def unknown_option(option: str, keys: Sequence[str]) -> str:
    """What is wrong with an argument that begins with `-`."""
    written, has_value, value = option.partition("=")
    name = written.lstrip("-").replace("-", "_")
    known = "There are --help and --show, and key=value."
    if name.rpartition(".")[2] in OF_THE_LAUNCHER.split():
        known = LAUNCHER
    elif key := _known_as(name, keys):
        known = f"Write {shlex.quote(f'{key}={value}')}." if has_value else f"The key is {key}."
    return f"There is no option '{written}'. {known}"


def unknown_key(key: str, keys: Sequence[str]) -> str:
    """That a key is none, and which one is meant."""
    name = key.rpartition(".")[2]
    if name in OF_THE_LAUNCHER.split():
        return f"There is no key '{key}'. {LAUNCHER}"
    near = _known_as(key, keys) or next(_alike(key, keys), None)
    if near is None:
        last = {known.rpartition(".")[2]: known for known in keys}
        near = next((last[match] for match in _alike(name, last, 0.5)), None)
    hint = f" The nearest key is {near}." if near else ""
    return f"There is no key '{key}'.{hint} All keys: --help."


def quoted(text: str) -> str:
    """A text in the quotes of Hydra's grammar: backslashes count only before a quote."""
    inner = re.sub(r'(\\*)"', r"\1\1" + r"\\" + '"', text)
    return '"' + re.sub(r"(\\+)$", r"\1\1", inner) + '"'


def quoted_argument(key: str, text: str, read: Callable[[str], object]) -> str | None:
    """The argument, as the shell takes it, of which Hydra makes this text; None where none does.

    `read` is what Hydra makes of an argument; it may raise.
    """
    argument = f"{key}={quoted(text)}"
    try:
        return shlex.quote(argument) if read(argument) == text else None
    except Exception:  # Hydra's and OmegaConf's many kinds: no suggestion
        return None


def _known_as(key: str, keys: Sequence[str]) -> str | None:
    """The key itself, the one of this bare or misplaced name, or the one it is an alias of."""
    name = key.rpartition(".")[2]
    if key in keys:
        return key
    same = [known for known in keys if known.rpartition(".")[2] == name]
    same += [known for known, aliases in ALIASES.items() if name in aliases.split()]
    return same[0] if same else None


def _alike(word: str, words: Iterable[str], cutoff: float = 0.6) -> Iterator[str]:
    return iter(difflib.get_close_matches(word, words, n=1, cutoff=cutoff))
