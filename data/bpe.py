"""Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019), trained on the training text.

The result depends on the text alone: the trainer counts words and pairs, and breaks ties by the
numbers of the tokens, so neither the number of threads nor the order of the counts matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from data.pieces import Chunk
from data.subwords import SubwordTokenizer

END_OF_TEXT = "<|endoftext|>"
MOST_CHARACTERS = 100_000_000
"""The trainer holds every different word: of a longer text it reads a part, spread over all."""


def train_bpe(size: int, chunks: Iterable[Chunk], characters: int) -> SubwordTokenizer:
    """Train a tokenizer of at most `size` tokens on the chunks that are not held out.

    They have about `characters` characters. A text in which fewer pairs occur twice gives fewer
    tokens. Raises DataError as reading the chunks does.
    """
    tokenizer = RustTokenizer(models.BPE())
    # Every byte has a token, so every text has an encoding. The words are GPT-2's.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_sample(chunks, characters), trainer=trainer)
    content = tokenizer.to_str(pretty=False).encode() + b"\n"
    return SubwordTokenizer(content, {"eos_token": END_OF_TEXT}, f"data.tokenizer=bpe:{size}")


def _sample(chunks: Iterable[Chunk], characters: int) -> Iterator[str]:
    """The text of every n-th chunk, `MOST_CHARACTERS` of them at most."""
    every = -(-characters // MOST_CHARACTERS)
    for number, chunk in enumerate(chunks):
        if chunk.held_out:
            return
        if number % every == 0:
            yield chunk.text
