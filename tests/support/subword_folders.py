"""Tokenizers of subwords for tests: trained on a few words, or as a model on the Hub has them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from data.chunks import Chunk
from data.subwords import SubwordTokenizer, train_bpe

WORDS = "the run goes on where it was, and no step is lost or done twice. Größe, 日本語, 🙂 "
END = "<|end|>"


def trained(size: int = 300, text: str = WORDS * 20) -> SubwordTokenizer:
    """Byte-level BPE of this project."""
    return train_bpe(size, [Chunk(text, True, False)], len(text))


def foreign_folder(folder: Path, **settings: object) -> Path:
    """The tokenizer of some model, of bytes: it begins each text with <s>, and cuts and pads it.

    Its special tokens are objects, it names a class of its own, and its template is a file.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    theirs = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", END)])
    begin = theirs.token_to_id("<s>")
    theirs.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    theirs.enable_truncation(4)
    theirs.enable_padding(length=9)
    folder.mkdir(parents=True, exist_ok=True)
    theirs.save(str(folder / "tokenizer.json"))
    known = {
        "tokenizer_class": "SomeTokenizer",
        "bos_token": {"content": "<s>", "lstrip": False, "special": True},
        "eos_token": END,
        "pad_token": "<not in the vocabulary>",
        "model_max_length": 8,
        "add_bos_token": True,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<s>"}))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return folder
