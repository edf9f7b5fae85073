"""trace.py: what a step sends is what the planner predicts, and its page shows where."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import families
import runs
import web_browser
from tracing.drawing import time_line
from tracing.spans import Process, Span, collectives_of, computing, read_process, share_of

CONFIGS = {"DDP": "ddp_cpu.yaml", "FSDP": "fsdp_cpu.yaml"}
SMALL = ["model.n_layer=2", "train.micro_batch_size=3", "optim.name=adamw"]
"""Two micro-batches of three sequences on each of two processes."""
WEIGHTS = 4 * (103 * 128 + 64 * 128 + 2 * (12 * 128**2 + 13 * 128) + 2 * 128)
"""Bytes in float32: both embeddings, two blocks, and the last normalisation."""


ORDER, MODEL = "Collectives in the order of their calls", "What each process has of the model"
SEQUENCE = "What each process has of a sequence"
"""Headings of the page."""


def trace(config: str | Path, folder: Path, *words: str) -> tuple[dict, Path]:
    """The printed rows by kind: calls, counted and predicted bytes; and the folder of the trace."""
    run_dir = folder / "run"
    traced = ("with", "trace.py", f"run.dir={run_dir}", *words)
    command = runs.launch_command(config, *traced, script=runs.ON_CPU)
    result = runs.run(command)
    assert result.returncode == 0, result.stderr
    assert not run_dir.exists()  # a trace leaves the run alone
    assert not [*folder.glob("run-trace/*_[0-9].json")]  # each process has written its own
    assert not re.search(r"^(USDT|STAGE):", result.stdout + result.stderr, re.MULTILINE)
    number = r"([\d,]+)"
    rows = re.findall(rf"^(\S.*?)  +{number} +{number} +{number} +[\d.]+ ", result.stdout, re.M)
    found = {kind: tuple(int(one.replace(",", "")) for one in rest) for kind, *rest in rows}
    return found, folder / "run-trace"


@pytest.fixture(scope="module")
def traced(request, tmp_path_factory):
    """The rows and the folder of a trace under a strategy."""
    folder = tmp_path_factory.mktemp("traced")
    return trace(CONFIGS[request.param], folder, *SMALL)


SHARDED = pytest.param("FSDP", marks=pytest.mark.thorough)
each_strategy = pytest.mark.parametrize("traced", ["DDP", SHARDED], indirect=True)


@pytest.mark.parametrize("traced", ["DDP"], indirect=True)
def test_ddp_sends_weights_once_and_gradients_at_the_last(traced):
    rows, folder = traced
    assert rows == {
        "broadcast of the weights, at the start": (1, WEIGHTS, WEIGHTS),
        "all-reduce": (2, WEIGHTS, WEIGHTS),
    }
    page = (folder / "trace.html").read_text()
    assert (
        f"only the last one sends (no_sync): {WEIGHTS:,} bytes instead of {2 * WEIGHTS:,}" in page
    )
    buckets = re.findall(r"<td>([\d,]+)</td><td>(\d+)</td><td>(\S+) \.\.\. (\S+?)</td>", page)
    assert sum(int(size.replace(",", "")) for size, *_ in buckets) == WEIGHTS
    assert sum(int(count) for _, count, *_ in buckets) == 28
    assert buckets[0][2].startswith("transformer.ln_f.")
    assert buckets[-1][3] == "transformer.wte.weight"
    assert f"<h2>{ORDER}</h2>" in page
    assert f"<h2>{MODEL}</h2>" in page
    assert SEQUENCE not in page  # each process has sequences of its own


@pytest.mark.thorough
@pytest.mark.parametrize("traced", [SHARDED], indirect=True)
def test_fsdp_sends_in_each_micro_batch_what_is_predicted(traced):
    rows, folder = traced
    assert list(rows) == ["all-gather", "reduce-scatter", "all-reduce of the norm"]
    for _, counted, predicted in rows.values():
        assert counted == predicted
    assert rows["reduce-scatter"][1] == pytest.approx(2 * WEIGHTS, rel=0.001)  # with padding
    assert 1.9 * 2 * WEIGHTS < rows["all-gather"][1] < 2.001 * 2 * WEIGHTS
    assert rows["all-reduce of the norm"][1] == 4 * 28
    assert "FSDP sends after each of them" in (folder / "trace.html").read_text()


@pytest.mark.slow
def test_fsdp_sends_weights_and_gradients_once_a_step_by_a_key(tmp_path):
    words = ["run.sync_each_micro_batch=false", "run.reduce_dtype=float32"]
    rows, folder = trace("fsdp_cpu.yaml", tmp_path, *SMALL, *words)
    for kind in ("all-gather", "reduce-scatter"):
        _, counted, predicted = rows[kind]
        assert counted == predicted == pytest.approx(WEIGHTS, rel=0.001)
    assert counted_over_predicted(folder) == pytest.approx(1, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp_cpu.yaml", "fsdp_cpu.yaml"])
def test_gradients_reduced_in_bf16_take_half_the_bytes(config, tmp_path):
    rows, _ = trace(config, tmp_path, *SMALL, "run.reduce_dtype=bf16")
    kind, times = ("all-reduce", 1) if config == "ddp_cpu.yaml" else ("reduce-scatter", 2)
    assert rows[kind][1] == rows[kind][2] == pytest.approx(times * WEIGHTS / 2, rel=0.001)


@pytest.mark.parametrize(
    ("strategy", "kind", "shares"),
    [
        ("DDP", "all-gather of updates", 2),
        pytest.param("FSDP", "all-to-all", 2, marks=pytest.mark.slow),
    ],
)
def test_muon_sends_the_updates_that_are_predicted(strategy, kind, shares, tmp_path):
    """Each process gathers, or sends its shards of all and gives back those of its own."""
    rows, folder = trace(CONFIGS[strategy], tmp_path, *SMALL, "optim.name=muon")
    _, counted, predicted = rows[kind]
    assert counted == predicted == shares * 12 * 128**2 * 4  # the matrices of two blocks
    assert counted_over_predicted(folder) == pytest.approx(1, abs=0.02)


@pytest.mark.slow
def test_hybrid_sharding_sends_what_is_predicted(tmp_path):
    words = ["model.n_layer=2", "optim.name=adamw", "train.micro_batch_size=1"]
    rows, folder = trace("fsdp_hybrid_cpu.yaml", tmp_path, *words)  # three micro-batches
    assert list(rows) == ["all-gather", "reduce-scatter", "all-reduce", "all-reduce of the norm"]
    for _, counted, predicted in rows.values():
        assert counted == predicted
    assert rows["all-reduce"][1] == pytest.approx(WEIGHTS / 2, rel=0.001)  # once a step
    assert rows["reduce-scatter"][1] == pytest.approx(3 * WEIGHTS, rel=0.001)
    assert "2 groups of 2 processes" in (folder / "trace.html").read_text()


@pytest.mark.parametrize(
    ("processes", "groups"),
    [pytest.param(2, 1, marks=pytest.mark.thorough), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_processes_that_share_sequences_send_what_is_predicted(tmp_path, processes, groups):
    changes = {"parallelism_config_dp_shard_size": groups}
    file = runs.rehearsal("cp_cpu.yaml", tmp_path, processes, **changes)
    rows, folder = trace(file, tmp_path, *SMALL)
    micro_batches = 12 // (3 * groups)  # of the 12 sequences of a step
    layers, positions, width = 2, 64, 128
    keys_and_values = layers * micro_batches * 2 * 4 * 3 * positions * width
    for kind in ("all-gather of keys and values", "reduce-scatter of their gradients"):
        assert rows[kind] == (layers * micro_batches, keys_and_values, keys_and_values)
    for kind in ("all-gather", "reduce-scatter", "all-reduce of the norm"):
        assert rows[kind][1] == rows[kind][2]
    page = (folder / "trace.html").read_text()
    assert "each sequence shared by 2 processes" in page
    assert f"<h2>{SEQUENCE}</h2>" in page
    # Late collectives hold their buffers longer than the plan's; without one it is 1.001.
    assert 0.99 < counted_over_predicted(folder) < 1.06


@pytest.mark.parametrize(
    ("config", "processes", "context"),
    [
        pytest.param("tp_cpu.yaml", 2, 1, marks=pytest.mark.thorough),
        pytest.param("fsdp_tp_cpu.yaml", 4, 1, marks=pytest.mark.slow),
        pytest.param("tp_cpu.yaml", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_processes_that_share_matrices_send_what_is_predicted(tmp_path, config, processes, context):
    file = runs.rehearsal(config, tmp_path, processes, parallelism_config_cp_size=context)
    rows, folder = trace(file, tmp_path, *SMALL)
    groups, shards = processes // 2 // context, processes // 2
    micro_batches = 12 // (3 * groups)  # of the 12 sequences of a step
    positions = 3 * 64 // context
    # Into two layers of each of two blocks and into the head, out of the former and the embedding.
    calls, size = 10 * micro_batches, 10 * micro_batches * 4 * positions * 128
    for kind in ("all-gather of positions", "reduce-scatter of outputs"):
        assert rows[kind] == (calls, size, size)
    size = micro_batches * 4 * (2 * positions + 1)  # maxima, sums and a loss
    assert rows["all-reduce over the vocabulary"] == (3 * micro_batches, size, size)
    wholes = 4 * (64 * 128 + 2 * 6 * 128 + 2 * 128)  # positions, norms and biases of outputs
    assert rows["all-reduce of gradients"] == (1, wholes // shards, wholes // shards)
    assert rows["all-gather of norms"] == (1, 8, 8)
    for _, counted, predicted in rows.values():
        assert counted == predicted
    assert ("reduce-scatter" in rows) == (shards > 1)  # FSDP over one process sends nothing
    page = (folder / "trace.html").read_text()
    assert "each matrix shared by 2 processes" in page
    assert f"{WEIGHTS / 1e6:.2f} MB of weights" in page  # those of the whole model
    assert f"<h2>{SEQUENCE}</h2>" in page
    assert counted_over_predicted(folder) == pytest.approx(1, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "processes"), [("tp_cpu.yaml", 2), ("fsdp_tp_cpu.yaml", 4)])
def test_shared_models_of_transformers_send_what_is_predicted(tmp_path, config, processes):
    base = families.make("llama", tmp_path / "base")
    file = runs.rehearsal(config, tmp_path, processes)
    words = [f"model.pretrained={base}", "data.block_size=16", "train.global_batch_size=8"]
    rows, folder = trace(file, tmp_path, *words, "train.micro_batch_size=2", "optim.name=adamw")
    assert {"all-reduce of outputs", "all-reduce over the vocabulary"} <= rows.keys()
    for _, counted, predicted in rows.values():
        assert counted == predicted
    assert counted_over_predicted(folder) == pytest.approx(1, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize(
    "words",
    [
        ["model.activation_checkpointing=true"],
        ["run.sync_each_micro_batch=false"],
        ["optim.name=muon"],
    ],
)
def test_shared_matrices_in_bf16_take_what_is_predicted(tmp_path, context, words):
    sizes = {"parallelism_config_cp_size": context, "mixed_precision": "bf16"}
    sizes["parallelism_config_dp_shard_size"] = 2 // context
    file = runs.rehearsal("fsdp_tp_cpu.yaml", tmp_path, 4, **sizes)
    rows, folder = trace(file, tmp_path, *SMALL, *words)
    assert len(rows) > 6
    for _, counted, predicted in rows.values():
        assert counted == predicted
    assert counted_over_predicted(folder) == pytest.approx(1, abs=0.02)


@pytest.mark.slow
def test_adapters_and_shorter_sequences_are_predicted_as_well(finished_run, text_file, tmp_path):
    words = [f"model.pretrained={finished_run}", "model.lora_rank=4", "data.block_size=8"]
    rows, folder = trace("fsdp_cpu.yaml", tmp_path, *words, f"data.source={text_file}")
    assert list(rows) == ["all-gather", "reduce-scatter", "all-reduce of the norm"]
    for _, counted, predicted in rows.values():
        assert counted == predicted
    assert 10 * rows["reduce-scatter"][1] < rows["all-gather"][1]  # most is frozen
    # As below: a late collective adds 0.018.
    assert counted_over_predicted(folder) == pytest.approx(1, abs=0.03)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["bf16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_plan_knows_how_frozen_weights_are_kept(kind, tmp_path):
    words = ["optim.freeze=['*.mlp.*','*.attn.*']", f"model.frozen_dtype={kind}"]
    _, folder = trace("cpu.yaml", tmp_path, *SMALL, "model.n_embd=256", *words)
    assert counted_over_predicted(folder) == pytest.approx(1, abs=0.03)


def counted_over_predicted(folder: Path) -> float:
    """Of the peak of the tensors' memory, as the page says it."""
    page = (folder / "trace.html").read_text()
    (ratio,) = re.findall(r"counted over predicted is ([\d.]+)\.<", page)
    return float(ratio)


@pytest.mark.thorough
@each_strategy
def test_the_counted_peak_is_the_predicted_one(traced):
    # Under FSDP a collective that is late holds its block's buffer longer than the plan's.
    assert counted_over_predicted(traced[1]) == pytest.approx(1, abs=0.03)


@pytest.mark.thorough
@each_strategy
def test_the_chrome_trace_has_both_processes(traced):
    events = json.loads((traced[1] / "trace.json").read_text())["traceEvents"]
    steps = [one for one in events if one.get("name", "").startswith("step ")]
    assert len({one["pid"] for one in steps}) == 2
    assert sorted(one["name"] for one in steps) == sorted(2 * ["step 1", "step 2", "step 3"])


@pytest.mark.thorough
@each_strategy
def test_the_page_shows_each_process_and_asks_for_nothing(traced):
    with web_browser.served(traced[1]) as address, web_browser.chromium() as chromium:
        for width, dark in ((1000, False), (400, True)):
            page = chromium.open(f"{address}trace.html", width=width, dark=dark)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            text = page.evaluate("document.body.textContent")
            assert "process 0" in text
            assert "process 1" in text
            unnamed = "[...document.querySelectorAll('[role]')].filter(o => !o.ariaLabel).length"
            assert page.evaluate(unnamed) == 0
            assert page.evaluate("document.querySelectorAll('details').length") == 2
            assert page.requested == [f"{address}trace.html"]


def test_one_process_has_time_and_memory_alone(tmp_path):
    rows, folder = trace("cpu.yaml", tmp_path, *SMALL)
    assert rows == {}
    page = (folder / "trace.html").read_text()
    assert "Memory of tensors" in page
    assert "Collectives" not in page


# By hand: a collective from 100 to 300 microseconds, while the process computes from 0 to 150 and
# from 250 to 400.


def event(name: str, ts: float, dur: float, tid: int = 1, **args: object) -> dict:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


CALL = event(
    "c10d::allreduce_", 90, 5, **{"Input Dims": [[[10]], []], "Input type": ["TensorList", ""]}
)
GLOO = event(
    "gloo:all_reduce", 100, 200, 2, **{"Input Dims": [[10]], "Input type": ["c10::BFloat16"]}
)
NCCL = {
    **event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", 100, 200, 7),
    "cat": "kernel",
    "args": {"In msg nelems": 10, "dtype": "BFloat16"},
}
ON_CPU = [event("aten::mm", 0, 90), event("aten::mm", 95, 55), event("aten::mm", 250, 150)]
ON_GPU = [{**one, "name": "gemm", "cat": "kernel", "tid": 7} for one in ON_CPU]


@pytest.mark.parametrize("events", [[*ON_CPU, CALL, GLOO], [*ON_GPU, CALL, NCCL]])
def test_a_collective_is_where_it_takes_place(events):
    (found,) = collectives_of(sorted(events, key=lambda one: one["ts"]), [Span("backward", 0, 400)])
    assert (found.name, found.start, found.end, found.called) == ("all-reduce", 100, 300, 90)
    assert (found.size, found.part, found.is_float) == (20, "backward", True)
    assert found.overlapped == pytest.approx((50 + 50) / 200)


def test_no_bar_covers_the_name_of_the_next():
    """Profiled parts overlap by a few microseconds."""
    process = Process(
        0, [Span("step 1", 0, 1000)], [Span("clip", 0, 520), Span("update", 500, 1000)]
    )
    picture = time_line([process], "a step")
    assert picture.rindex("<rect") < picture.index(">clip<")
    clip, update = re.findall(
        r'<rect class="(?:clip|update)" x="([\d.]+)".*? width="([\d.]+)"', picture
    )
    (name,) = re.findall(r'x="([\d.]+)"[^>]*>update<', picture)
    assert float(clip[0]) + float(clip[1]) <= float(name) < float(update[0]) + float(update[1])


def test_waiting_is_not_computing():
    waiting = event("aten::stack", 0, 100), event("_c10d_functional::wait_tensor", 50, 40)
    assert computing([*waiting, event("aten::mm", 100, 10)]) == [Span("", 100, 110)]


def test_a_share_is_of_the_whole_span():
    others = [Span("", 0, 10), Span("", 20, 30), Span("", 90, 200)]
    assert share_of(Span("", 5, 100), others) == pytest.approx((5 + 10 + 10) / 95)
    assert share_of(Span("", 40, 50), others) == 0
    assert share_of(Span("", 40, 40), others) == 0


def test_a_backward_pass_belongs_to_its_forward_s_block():
    """The operation before the one that made it, in another block, had the same number."""
    events = [
        event("step 1", 0, 1000),
        event("block 0", 10, 90),
        event("aten::mul", 20, 10, **{"Sequence number": 7}),
        event("aten::view", 90, 5, **{"Sequence number": 8}),
        event("block 1", 100, 100),
        event("aten::mul", 120, 10, **{"Sequence number": 8}),
    ]
    run = "autograd::engine::evaluate_function: MulBackward0"
    events.append(event(run, 300, 50, 3, **{"Sequence number": 8}))
    events.append(
        event("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 350, 9, 3)
    )
    events.append(event(run, 400, 50, 3, **{"Sequence number": 7}))
    process = read_process({"traceEvents": events}, 0)
    assert process.blocks == [
        Span("block 0", 10, 100),
        Span("block 1", 100, 200),
        Span("block 1", 300, 359),
        Span("block 0", 400, 450),
    ]
