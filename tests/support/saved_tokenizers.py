"""Tokenizers as transformers loads them from a snapshot."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.tokenizer import Tokenizer
from model.gpt import GPTConfig


def auto_tokenizer(tokenizer: Tokenizer, folder: Path) -> PreTrainedTokenizerBase:
    """AutoTokenizer of a folder that holds what a snapshot holds."""
    shape = GPTConfig(tokenizer.vocab_size, block_size=8, n_layer=1, n_head=1, n_embd=4)
    (folder / "config.json").write_text(json.dumps(shape.config_json()))
    tokenizer.save(folder)
    return AutoTokenizer.from_pretrained(folder)
