"""Text in the browser: characters a second of a Space in node and Chromium, and of sample.py.

    python benchmarks/space.py --turns 5

The model has the sizes of the default one, a vocabulary of 102 characters and random weights, on
which the speed does not depend. Each turn generates greedy text within the context, where a token
costs one position, and beyond it, where a token costs a full window, by all of them: node and
Chromium on the CPU, in one thread, and the loop of sample.py with torch on one thread.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import ROOT, as_words, machine, print_table, save, spread

sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

Speed = Callable[[int, int], float]
"""Characters a second after a prompt of so many tokens, for a text of such a length."""
SIZES = {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64, "activation_function": "gelu"}
CHARACTERS = 102
WITHIN, BEYOND = SIZES["n_positions"] - 1, 300
"""Characters after a prompt of one, and after one of a full context."""
PROMPTS = {"within the context": (1, WITHIN), "beyond the context": (64, BEYOND)}
IDLE = "!document.getElementById('generate').disabled"


def with_torch(model: Path) -> Speed:
    """As sample.py generates text, on one thread."""
    import torch

    from model.generate import generate
    from snapshot.command_line import place
    from snapshot.named_model import find_model

    torch.set_num_threads(1)
    loaded = place(find_model(str(model)).load(), torch.device("cpu"))

    def speed(prompt: int, length: int) -> float:
        ids = torch.ones(1, prompt, dtype=torch.long)
        started = time.perf_counter()
        tokens = sum(1 for _ in generate(loaded, ids, length, temperature=0))
        return tokens / (time.perf_counter() - started)

    return speed


def with_node(space: Path) -> Speed:
    from spaces import in_node

    def speed(prompt: int, length: int) -> float:
        calls = [("speed", [1] * prompt, length)] * 2  # the first one compiles
        return in_node(space, *calls)[1]

    return speed


def with_page(page, text: str) -> Speed:
    """What the page itself shows at the end."""

    def speed(prompt: int, length: int) -> float:
        fields = {"prompt": text * prompt, "length": length, "temperature": 0}
        for name, value in fields.items():
            page.evaluate(f"document.getElementById('{name}').value = {str(value)!r}")
        page.evaluate("document.getElementById('generate').click()")
        page.wait_for(IDLE)
        shown = page.evaluate("document.getElementById('status').textContent")
        return float(shown.split(", ")[1].split()[0].replace(",", ""))

    return speed


def main() -> None:
    """Print a row for each program."""
    import spaces
    import web_browser
    from data.tokenizer import CharTokenizer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    print(as_words(machine()))
    tokenizer = CharTokenizer("".join(map(chr, range(32, 32 + CHARACTERS))))
    with tempfile.TemporaryDirectory() as folder:
        model = spaces.random_model(Path(folder) / "model", tokenizer, **SIZES)
        space = spaces.space_of(model, Path(folder) / "space")
        size = sum(path.stat().st_size for path in space.iterdir())
        print(f"the folder of the Space: {size / 1e6:.2f} MB")
        with web_browser.served(space) as address, web_browser.chromium() as chromium:
            page = chromium.open(f"{address}?device=cpu")
            page.wait_for("document.getElementById('status').textContent.startsWith('Ready')")
            programs = {
                "sample.py, torch on one thread": with_torch(model),
                "node, CPU": with_node(space),
                "Chromium, CPU in a worker": with_page(page, "!"),
            }
            found = measure(programs, options.turns)
    print_table(
        ("characters/s, median (range)", *PROMPTS),
        [(name, *(spread(found[name][kind], 0) for kind in PROMPTS)) for name in programs],
    )
    save("space", {"megabytes": size / 1e6, "characters_per_second": found})


def measure(programs: dict[str, Speed], turns: int) -> dict:
    """Characters a second by program and kind; a first turn warms up, and is dropped."""
    found = {name: {kind: [] for kind in PROMPTS} for name in programs}
    for turn in range(turns + 1):
        for kind, (prompt, length) in PROMPTS.items():
            for name, speed in programs.items():
                measured = speed(prompt, length)
                if turn:
                    found[name][kind].append(measured)
    return found


if __name__ == "__main__":
    main()
