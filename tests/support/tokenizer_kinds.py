"""Tokenizers of each kind that models have: of bytes, and as SentencePiece makes them."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import ByteLevel

import chats
from data.subwords import SubwordTokenizer

MARKS = [
    *("<s>", "</s>", "<</s>>", "<|im_start|>", "<|im_end|>"),
    *("<think>", "</think>", "[INST]", "[/INST]", "]<|"),
]


def byte_level(trim_offsets: bool) -> Tokenizer:
    rust = Tokenizer.from_buffer(chats.tokenizer()._content)
    rust.post_processor = None
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim_offsets)
    if trim_offsets:
        rust.post_processor = ByteLevel(trim_offsets=True)
    return rust


PIECES = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz:"]
WORDS = ["▁t", "he", "▁the", "on", "▁on", "▁it", "as", "▁was", "▁w", "it", "▁g", "▁i", "▁n", "▁no"]
MERGES = [
    *("▁ t", "h e", "▁t he", "o n", "▁ on", "i t", "▁ it"),
    *("a s", "▁ w", "▁w as", "▁ g", "▁ i", "▁ n", "▁n o"),
]


def llama_2(metaspace: bool) -> Tokenizer:
    """BPE with bytes for what is unknown; the space before a text by a normalizer, or Metaspace."""
    vocabulary = {piece: i for i, piece in enumerate([*PIECES, *WORDS])}
    merges = [(first, second) for first, second in map(str.split, MERGES)]
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    rust = Tokenizer(models.BPE(vocabulary, merges, **options))
    if metaspace:
        rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        rust.normalizer = normalizers.Sequence(steps)
    return rust


def unigram() -> Tokenizer:
    scores = [(piece, -8.0 - (piece[0] == "<")) for piece in PIECES]
    rust = Tokenizer(models.Unigram([*scores, *((word, -3.0) for word in WORDS)], 0, True))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return rust


ALL = {
    "bytes": lambda: byte_level(trim_offsets=False),
    "bytes, trimmed": lambda: byte_level(trim_offsets=True),
    "Llama 2": lambda: llama_2(metaspace=False),
    "Llama 2, Metaspace": lambda: llama_2(metaspace=True),
    "Unigram": unigram,
}


def tokenizer(name: str, template: str = "{{ messages }}") -> SubwordTokenizer:
    """The tokenizer of a kind, with special tokens and a chat template."""
    rust = ALL[name]()
    if name.startswith(("Llama", "Unigram")):
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    rust.add_special_tokens(MARKS)
    settings = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": template}
    return SubwordTokenizer(rust.to_str().encode(), settings, name)
