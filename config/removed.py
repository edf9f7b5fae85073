"""What earlier versions had and this one lacks, by the name that a user types.

The only place that knows. A key, a value of a key (`key=value`), or an option or a subcommand of a
program (`prove.py --faults`), each with what to do instead.
"""

from __future__ import annotations

from collections.abc import Sequence

REMOVED: dict[str, str] = {
    "hub.bucket": "set hub.url=hf://buckets/<owner>/<name> instead",
    "data.documents=separate": "use data.documents=masked, in which a document sees itself alone",
    "data.num_workers": "leave it out, because the training process reads its batches itself",
    "prove.py --faults": "leave it out; pytest tests/promises causes these faults",
    "plan.py --count": (
        "plan one mesh at a time with --processes, --context and --tensor, and compare the rows"
    ),
    "plan.py --context-strategy": (
        "leave it out, because processes that share sequences always exchange heads (alltoall)"
    ),
    "python -m snapshot audit": (
        "train again with snapshot.resume=A run.dir=again train.max_steps=<step of B>, and compare "
        "the sha256 of model.safetensors in both manifest.json"
    ),
    "hub.silence_seconds": "leave it out, because no attempt waits for another one",
    "hub.squash_every": (
        "leave it out: the contents of pruned snapshots are deleted one by one. Where a server "
        "cannot, HfApi().super_squash_history(repo) frees them"
    ),
    "hub.standby": (
        "let a scheduler start the same command again (Slurm, a Kubernetes Job, "
        "python -m cloud.attempts); the newest start owns the run"
    ),
    "run.interruptions_per_day": "give snapshot.every_minutes, the most that a lost machine costs",
    "run.metadata_address": "give python -m cloud.attempts --notice-address the address",
    "run.notice_seconds": "leave it out: a notice stops the run with a snapshot at once",
    "run.preemption_notice": "start the run with python -m cloud.attempts --notice auto",
    "run.max_cost": "run.max_minutes limits each attempt: divide the sum by the price of a minute",
    "run.price_per_hour": "multiply the hours that prove.py prints by the price yourself",
    "snapshot.resume=never": (
        "a run resumes what run.dir holds. To start over, move that away, or give another run.name"
    ),
    "snapshot.whole": (
        "leave it out: snapshots are whole models. To save less, train adapters (model.lora_rank)"
    ),
    "snapshot.staging_bytes": (
        "leave it out: what an update would change is copied where half of the free memory "
        "suffices for all of it; otherwise the update waits"
    ),
    "snapshot.every=auto": "give snapshot.every_minutes=10, or a number of steps",
    "run.adapt_threads": (
        "leave it out; OMP_NUM_THREADS sets the number of threads, at most one for each core"
    ),
    "run.attention=cudnn": "use kernel or flash3, with which a resumed run has the same bits",
    "run.compile_short_runs": (
        "what the accelerate config file says is compiled. --dynamo_backend no of the launcher "
        "compiles nothing"
    ),
    "run.emulate_bf16": "leave it out; a CPU without bf16 instructions uses float32, faster there",
    "run.measure_peak": (
        "leave it out; metrics.jsonl has the share of the peak that NVIDIA publishes (mfu)"
    ),
    "run.residual_dtype": (
        "blocks add up in float32. model.activation_checkpointing=true saves more memory"
    ),
    "model.family": (
        "leave it out; model=llama_tiny and model=llama_124m are Llamas, and model.architecture "
        "takes any other family"
    ),
    "model.n_kv_head": (
        "set num_key_value_heads in a copy of model/architectures/llama_tiny/config.json, and name "
        "its folder in model.architecture"
    ),
    "optim.state_dtype": (
        "what the optimizer keeps is float32. optim.name=muon keeps one number of each weight of "
        "a block instead of two, and FSDP divides them among the processes"
    ),
}


def removed(name: str, value: str = "") -> str | None:
    """The sentence for a key, or for a value of a key, that is gone; None for any other."""
    for gone in (f"{name}={value}", name):
        if gone in REMOVED:
            return f"{gone} was removed in 0.2.0: {REMOVED[gone]}."
    return None


def removed_option(program: str, arguments: Sequence[str]) -> str | None:
    """The sentence for an option or a subcommand of a program that is gone, if there is one."""
    names = (f"{program} {argument.partition('=')[0]}" for argument in arguments)
    return next((sentence for name in names if (sentence := removed(name))), None)
