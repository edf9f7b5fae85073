"""train.py, a minimal loop and nanoGPT on GPT-2's shape, in turns on one device."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from gpu_items import Row, Settings
from gpu_steps import free_memory, peak_flops
from harness import ROOT, flops_per_token, median, spread
from turns import Contestant, other, ours, take_turns

from config.schema import DataConfig
from data.corpus import prepare_corpus

SOURCE = "python-stdlib"
TURNS, WARM_UP = 5, 5


def config_file(settings: Settings) -> str:
    """The accelerate config file of the device, in accelerate_configs/."""
    return "cpu.yaml" if settings.rehearse else "single_gpu.yaml"


def prepare(settings: Settings) -> list[str]:
    """Prepare text and tokenizer, once for all items; return the overrides that name them.

    The tokenizer is trained on the standard library's source, which has fewer pairs than GPT-2 has
    tokens. Tokens that no text contains fill it up to GPT-2's number, as in nanoGPT up to 50,304.
    """
    free_memory()  # of earlier items in this process: others need the device now
    source = "python-docs" if settings.rehearse else SOURCE
    cache, folder = Path(settings.folder, "data"), Path(settings.folder, "tokenizer")
    data = DataConfig(source, block_size=32, cache_dir=str(cache))
    if not folder.exists():
        trained = prepare_corpus(data, f"bpe:{settings.vocabulary}").tokenizer
        building = folder.with_name("tokenizer.new")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        trained.save(building)
        content = json.loads((building / "tokenizer.json").read_text())
        unused = range(trained.vocab_size, settings.vocabulary)
        content["model"]["vocab"] |= {f"<unused {number}>": number for number in unused}
        (building / "tokenizer.json").write_text(json.dumps(content))
        building.rename(folder)
    prepare_corpus(data, folder)
    return [f"data.source={source}", f"data.tokenizer={folder}", f"data.cache_dir={cache}"]


def whole_model_config(settings: Settings) -> str:
    """The device's accelerate config file without compilation by block, as a path."""
    content = yaml.safe_load((ROOT / "accelerate_configs" / config_file(settings)).read_text())
    content.get("dynamo_config", {}).pop("dynamo_use_regional_compilation", None)
    path = Path(settings.folder, "whole.yaml").resolve()
    path.write_text(yaml.safe_dump(content))
    return str(path)


def contestants(settings: Settings, compiled: bool) -> dict[str, Callable[[], Contestant]]:
    """How each contestant is started, by its name. The first is train.py as it is shipped."""
    text = prepare(settings)
    words = [*settings.words(), *text]
    precision = "--mixed_precision=bf16"
    folder = Path(settings.folder, "contest")
    backend = f"--dynamo_backend={settings.backend if compiled else 'no'}"
    by_block = (precision, backend, *(["--dynamo_use_regional_compilation"] * compiled))
    shipped = config_file(settings)
    bare = {
        **settings.shape,
        "source": text[0].partition("=")[2],
        "tokenizer": text[1].partition("=")[2],
        "cache": str(Path(settings.folder, "data")),
        "compile": compiled,
        "backend": settings.backend,
        "precision": "bf16",
    }
    nanogpt = {**bare, "path": settings.nanogpt}
    found = {"train.py": lambda: ours("train.py", shipped, words, folder, by_block)}
    if settings.nanogpt is not None:
        found["nanoGPT"] = lambda: other("nanoGPT", "nanogpt", nanogpt)
    found["bare loop"] = lambda: other("bare loop", "bare", bare)
    # As train.py, which needs the same bits: torch then takes another kernel for attention.
    same_kernels = {**bare, "deterministic": True}
    found["bare loop, deterministic"] = lambda: other("deterministic", "bare", same_kernels)
    if compiled:
        whole = whole_model_config(settings)
        found["train.py, compiled whole"] = lambda: ours(
            "whole", whole, words, folder, (precision, backend)
        )
    return found


def contest_rows(settings: Settings, compiled: bool) -> list[Row]:
    """Let all contestants take turns. One that fails is left out, with a row that says so."""
    makers = contestants(settings, compiled)
    failed: dict[str, str] = {}

    def begin(name: str) -> Contestant | None:
        """Start and warm up, all at once: most of the time is starting Python and compiling."""
        try:
            contestant = makers[name]()
            contestant.run_steps(WARM_UP, warm_up=True)
            return contestant
        except SystemExit as error:
            failed[name] = f"failed: {error}"[-300:]
            return None

    with ThreadPoolExecutor() as pool:
        begun = dict(zip(makers, pool.map(begin, makers), strict=True))
    running = {name: contestant for name, contestant in begun.items() if contestant is not None}
    try:
        if "train.py" in running:
            steps = 2 if settings.rehearse else 20
            take_turns(list(running.values()), steps, TURNS, warm_up=1)
    finally:
        for contestant in running.values():
            contestant.end()
    if "train.py" in failed:
        raise RuntimeError(failed["train.py"])
    rows = [row_of(settings, name, one, running["train.py"]) for name, one in running.items()]
    return rows + [{"contestant": name, "tokens/s": why} for name, why in failed.items()]


def row_of(settings: Settings, name: str, one: Contestant, first: Contestant) -> Row:
    tokens = settings.shape["batch"] * settings.shape["block_size"]
    reached = tokens / median(one.seconds)
    ratios = [theirs / mine for theirs, mine in zip(one.seconds, first.seconds, strict=True)]
    peak = peak_flops("bf16")
    flops = flops_per_token(one.facts["parameters"], settings.shape)
    return {
        "contestant": name,
        "ms a step": spread([1e3 * value for value in one.seconds], 1),
        "tokens/s": round(reached),
        "MFU": None if peak is None else reached * flops / peak,
        "train.py / this": median(ratios),
        "spread": spread(ratios),
        "peak MB": round(one.memory) or None,
    }
