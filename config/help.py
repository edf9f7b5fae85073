"""The help text, and the tables of docs/configuration.md, both read from the schema itself.

python -m config.help                what `python train.py --help` prints
python -m config.help --markdown     the tables of docs/configuration.md
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from itertools import groupby, pairwise

from omegaconf import OmegaConf

import config.schema
from common.command import exit_code_of
from config.compose import CONFIG_DIR, compose_valid

PRESETS = sorted(path.stem for path in (CONFIG_DIR / "model").glob("*.yaml"))
"""The presets of `model=`."""
USAGE = f"""\
Train a GPT:

  accelerate launch [--config_file accelerate_configs/WHICH.yaml] train.py [key=value ...]

  model=PRESET             sizes and learning rates:
                           {" ".join(PRESETS)}
  experiment=NAME          a whole run: shakespeare_char, shakespeare_char_cpu (each also with
                           _reference), finetune_gpt2, chat_smollm
  model.pretrained=NAME    continue from a model, or model.architecture=NAME from its config.json
  --show                   print the configuration and stop

A value with non-ASCII letters or one of , = ( ) [ ] {{ }} ' " # ; & ~ needs Hydra's quotes inside
the shell's: 'data.source="my text (1).txt"'.
"""


def key_rows() -> Iterator[tuple[str, str, str]]:
    """(key, default, meaning) of every key, the default as a run without overrides has it."""
    defaults, _ = compose_valid([])
    tree = ast.parse(inspect.getsource(config.schema))
    classes = {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
    for section in map(str, defaults):
        body = classes[type(OmegaConf.to_object(defaults[section])).__name__]
        for entry, below in pairwise(body):
            if isinstance(entry, ast.AnnAssign) and isinstance(below, ast.Expr):
                name, meaning = ast.unparse(entry.target), ast.literal_eval(below.value)
                default = defaults[section][name]
                shown = json.dumps(default) if default in (None, True, False) else str(default)
                yield f"{section}.{name}", shown, meaning


def help_text() -> str:
    """The whole text of `--help`."""
    rows = list(key_rows())
    width = max(len(key) for key, _, _ in rows)
    lines = [f"  {key:<{width}}  {meaning} [{default}]" for key, default, meaning in rows]
    return USAGE + "\nKeys [default]:\n" + "\n".join(lines)


def markdown() -> str:
    """All keys, a table for each section, as Markdown."""
    lines = []
    for section, rows in groupby(key_rows(), lambda row: row[0].partition(".")[0]):
        lines += [f"### `{section}`", "", "| key | default | meaning |", "|---|---|---|"]
        lines += [f"| `{key}` | `{default}` | {meaning} |" for key, default, meaning in rows]
        lines.append("")
    return "\n".join(lines).rstrip()


def main() -> int:
    """Print all keys; return the exit code."""
    print(markdown() if sys.argv[1:] == ["--markdown"] else help_text())
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
