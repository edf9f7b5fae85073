"""prove.py: a sound set-up is all green, and what costs people runs turns red."""

from __future__ import annotations

import json
import sys
from types import MappingProxyType

import pytest

import chats
import families
import planted
import runs

LIMIT_SECONDS = 900


def words_of(setting, small, folder):
    """The words of train.py for a set-up."""
    if setting == "a stream":
        numbers = [" ".join(str(i * k) for k in range(1, 3 + i % 7)) for i in range(1000, 4000)]
        rows = [json.dumps({"text": f"multiples: {row}"}) for row in numbers]
        (folder / "rows.jsonl").write_text("\n".join(rows))
        return [*small, f"data.source={folder / 'rows.jsonl'}"]
    if setting == "LoRA":
        return families.words(small, families.make("llama tied", folder / "llama"))
    if setting == planted.CHAT:
        base = chats.make("llama tied", folder / "llama")
        source = chats.write(folder / "chat.jsonl", planted.CONVERSATIONS)
        more = (f"data.source={source}", "data.documents=conversations", "data.block_size=48")
        return families.words(small, base, *more)
    if setting == planted.STORE:
        (folder / "store").mkdir()
        return [*small, f"hub.url=file://{folder}/store/run"]
    return small


def prove(root, folder, words, launch=None, changes=MappingProxyType({})):
    """Run prove.py of a tree, as a user would: the process, proof.json and its checks by name.

    `changes` are variables of the environment.
    """
    words = [*words, f"run.dir={folder / 'run'}"]
    command = [sys.executable, str(root / "prove.py"), *words]
    if launch is not None:
        command = runs.launch_command(launch, *words, script=root / "prove.py")
    result = runs.run(command, LIMIT_SECONDS, forked=False, **changes)
    path = folder / "run-proof" / "proof.json"
    assert path.exists(), result.stdout + result.stderr
    content = json.loads(path.read_text())
    return result, content, {line["name"]: line for line in content["checks"]}


@pytest.mark.parametrize("fault", planted.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_still_be_planted(fault):
    """A change of its line is seen here, and not only where the proofs of all faults run."""
    compile(planted.with_fault(fault), fault.file, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("fault", planted.FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(small, tmp_path, fault):
    root = planted.copy_with(fault, tmp_path / "tree")
    words = [*words_of(fault.setting, small, tmp_path), *fault.words]
    result, content, _ = prove(root, tmp_path, ["--stop-at-red", *words], fault.launch)
    assert result.returncode != 0
    assert content["processes"] == (1 if fault.launch is None else 2)
    red = [line for line in content["checks"] if line["status"] == "red"]
    print(f"| {fault.name} | {red[0]['name']} | {red[0]['said'][:120]} |")
    assert red[0]["name"] in fault.found_by


@pytest.fixture(params=["repo", "bucket"])
def words_of_store(request, hub):
    """The words of a run whose store is on the loopback Hub, where a bucket must exist."""
    if request.param == "bucket":
        hub.create_bucket("me/run")
    return {"repo": ["hub.repo_id=me/run"], "bucket": ["hub.url=hf://buckets/me/run"]}[
        request.param
    ]


@pytest.mark.slow
def test_a_store_is_proven_and_left_as_it_was(small, tmp_path, hub, words_of_store):
    """The run's own place is never asked for, nor created, and a bucket is left empty."""
    before = hub.names()
    words = [*small, *words_of_store, "hub.timeout_seconds=5"]
    result, content, lines = prove(runs.ROOT, tmp_path, words, changes=hub.environment())
    assert result.returncode == 0, result.stdout
    assert content["counts"]["red"] == 0
    for name in ("rights in the store", "upload", "killed in an upload", "resumed from the store"):
        assert lines[name]["status"] == "green"
    assert lines["same bits from the store"]["status"] == "green"
    assert hub.names() == before
    assert not any(hub.repo(name).files for name in before)


@pytest.mark.slow
def test_a_token_that_cannot_write_is_found(small, tmp_path, hub):
    changes = {**hub.environment(), "HF_TOKEN": hub.add_token("hf_loopbackReader", role="read")}
    words = [*small, "--stop-at-red", "hub.repo_id=me/run", "hub.timeout_seconds=5"]
    result, _, lines = prove(runs.ROOT, tmp_path, words, changes=changes)
    assert result.returncode == 1
    assert lines["store"]["status"] == "red"
    assert "is read-only" in lines["store"]["said"]


@pytest.mark.thorough
def test_a_sound_run_is_green_and_untouched(small, tmp_path):
    """And the run that follows says what was proven, and what differs. Takes half a minute."""
    words = small
    changes = {
        "OMP_NUM_THREADS": "1",  # threads that wait for each other are slow in CI
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # a notebook names it
    }
    result, content, lines = prove(runs.ROOT, tmp_path, words, changes=changes)
    assert result.returncode == 0, result.stdout
    assert content["counts"]["red"] == 0
    grey = {name for name, line in lines.items() if line["status"] == "grey"}
    assert grey == {"loss mask", "loss, one process", "store"}
    assert lines["same bits after all of that"]["status"] == "green"
    assert not (tmp_path / "run").exists()
    assert "»" in lines["first row"]["said"]
    assert sorted(path.name for path in (tmp_path / "run-proof").iterdir() if path.is_dir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["ddp_cpu.yaml", "fsdp_cpu.yaml", "tp_cpu.yaml", "cp_cpu.yaml"])
def test_a_sound_launch_is_green(small, tmp_path, launch):
    result, content, lines = prove(runs.ROOT, tmp_path, small, launch)
    assert result.returncode == 0, result.stdout
    assert content["processes"] == 2
    assert content["counts"]["red"] == 0
    assert lines["loss, one process"]["status"] == "green"


SOUND = {
    "dropout": ("model.dropout=0.2",),
    "bf16": (),
    "LoRA": ("model.lora_rank=4", "optim.learning_rate=1e-3"),
    "a stream": ("data.streaming=true", "data.tokenizer=bpe:257"),
    "conversations": (),
    "Muon": ("optim.name=muon",),
}
"""Set-ups that are all right, and the words of each."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_run_is_never_red(small, tmp_path, name):
    words = [*words_of(name, small, tmp_path), *SOUND[name]]
    launch = "cpu.yaml" if name == "bf16" else None
    result, content, _ = prove(runs.ROOT, tmp_path, words, launch)
    assert [line for line in content["checks"] if line["status"] == "red"] == []
    assert result.returncode == 0
