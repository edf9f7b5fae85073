"""Output layers that a config.json ties to the embedding although the weights have another.

transformers does not tie two tensors that a file holds with different values, whatever the config
says.
"""

from __future__ import annotations

from pathlib import Path

import torch

from model.layout import Layout
from snapshot.disk.reference import WHOLE
from snapshot.disk.tensors import TensorReader

TIE = "tie_word_embeddings"
"""The entry of config.json."""
ROWS = 4096
"""Of both tensors that are in memory at once."""


def has_own_output(folder: Path, layout: Layout) -> bool:
    """Whether the weights in a folder have an output layer that differs from the embedding.

    `layout` is that of a model which ties them; its tensors are in the folder. Raises
    SnapshotError for files that cannot be read.
    """
    with TensorReader(folder, WHOLE) as reader:
        shapes = reader.shapes()
        stored = reader.find(layout)
        embedding = stored[layout.embedding_name()].names[0]
        used = {name for one in stored.values() for name in one.names}
        # Surplus tensors are constants or copies of the embedding, or `find` had refused them.
        copies = [
            name
            for name, shape in shapes.items()
            if name not in used and shape == shapes[embedding]
        ]
        return not all(_are_equal(reader, embedding, copy) for copy in copies)


def _are_equal(reader: TensorReader, one: str, other: str) -> bool:
    first, second = reader.slice_of(one), reader.slice_of(other)
    count = first.get_shape()[0]
    parts = (slice(row, min(row + ROWS, count)) for row in range(0, count, ROWS))
    return all(torch.equal(first[part].float(), second[part].float()) for part in parts)
