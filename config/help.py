"""The help text, and the tables of docs/configuration.md, both read from the schema itself.

python -m config.help                what `python train.py --help` prints
python -m config.help --markdown     the tables of docs/configuration.md
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from dataclasses import fields, is_dataclass
from itertools import groupby

import config.schema
from config.compose import load_config
from config.schema import Config, gpt_config
from data.command import exit_code_of
from model.families import ARCHITECTURES

PRESETS = (
    *("tiny", "baby", "gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl"),
    *("llama_tiny", "llama_124m"),
)
"""The presets of `model=`: of each family, from the smallest."""
SIZES = (
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_embd", "hidden_size"),
)
"""Names of sizes in the config.json of a GPT-2, and in that of a Llama."""
USAGE = """\
Train a GPT:

  accelerate launch [--config_file accelerate_configs/WHICH.yaml] train.py [key=value ...]

  model=tiny|baby|gpt2|gpt2_medium|gpt2_large|gpt2_xl|llama_tiny|llama_124m
                                                         a preset of sizes and learning rates
  experiment=shakespeare_char|shakespeare_char_reference
             shakespeare_char_cpu|shakespeare_char_cpu_reference
             finetune_gpt2|chat_smollm                   a preset of a whole run
  model.pretrained=NAME|model.architecture=NAME           another model, with AdamW
  --show                                                 print the configuration and stop

A value with non-ASCII letters or one of , = ( ) [ ] { } ' " # ; & ~ needs Hydra's quotes inside the
shell's: 'data.source="naïve text (1).txt"'.
"""


def meanings() -> dict[str, dict[str, str]]:
    """The line below each field of the schema, by class and field."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(config.schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        texts = found.setdefault(node.name, {})
        for entry, below in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(entry, ast.AnnAssign)
                and isinstance(entry.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                texts[entry.target.id] = str(below.value.value)
    return found


def key_rows() -> list[tuple[str, str, str]]:
    """(key, default, meaning) of every key, the default as a run without overrides has it."""
    texts = meanings()
    default_run = load_config([])
    rows = []
    for section in fields(Config):
        group = getattr(default_run, section.name)
        assert is_dataclass(group)
        for entry in fields(group):
            default = getattr(group, entry.name)
            shown = "null" if default is None else str(default)
            if isinstance(default, bool):
                shown = shown.lower()
            rows.append(
                (f"{section.name}.{entry.name}", shown, texts[type(group).__name__][entry.name])
            )
    return rows


def help_text() -> str:
    """The whole text of `--help`."""
    width = max(len(key) for key, _, _ in key_rows())
    lines = [f"  {key:<{width}}  {meaning} [{default}]" for key, default, meaning in key_rows()]
    return USAGE + "\nKeys [default]:\n" + "\n".join(lines)


def markdown() -> str:
    """All keys, a table for each section, and the presets of `model=`, as Markdown."""
    lines = []
    for section, rows in groupby(key_rows(), lambda row: row[0].partition(".")[0]):
        lines += [f"### `{section}`", "", "| key | default | meaning |", "|---|---|---|"]
        lines += [f"| `{key}` | `{default}` | {meaning} |" for key, default, meaning in rows]
        lines.append("")
    lines += [
        "### Presets of `model=`",
        "",
        "| preset | family | layers | heads | width | dropout | GELU | optimizer | learning rate "
        "| steps |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for preset in PRESETS:
        loaded = load_config([f"model={preset}"])
        model = loaded.model
        sizes, gelu = gpt_config(loaded, 1).config_json(), f"`{model.activation_function}`"
        if model.architecture is not None:
            sizes, gelu = json.loads((ARCHITECTURES[preset] / "config.json").read_text()), "-"
        counts = [sizes.get(ours, sizes.get(theirs)) for ours, theirs in SIZES]
        lines.append(
            f"| `{preset}` | `{sizes['model_type']}` | {' | '.join(map(str, counts))} "
            f"| {model.dropout} | {gelu} | {loaded.optim.name} | {loaded.optim.learning_rate} "
            f"| {loaded.train.max_steps:,} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Print all keys; return the exit code."""
    print(markdown() if sys.argv[1:] == ["--markdown"] else help_text())
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
