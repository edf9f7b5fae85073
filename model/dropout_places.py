"""Where a model drops something in training, in a config.json and in its modules."""

from __future__ import annotations

from typing import Any

from torch import nn

DROPOUT = ("dropout", "pdrop", "dropout_prob", "dropout_p", "dropout_rate")
"""How the names of entries end that are probabilities of dropout."""


def with_dropout(
    content: dict[str, Any], complete: dict[str, Any], dropout: float
) -> dict[str, Any]:
    """A config.json with this probability at every place for one that its class has.

    `complete` has the entries that config.json lacks, too: the defaults of many are above 0.
    """
    found = dict(content)
    for key, value in complete.items():
        if isinstance(value, dict):
            given = content.get(key)
            inner = with_dropout(given if isinstance(given, dict) else {}, value, dropout)
            found |= {key: inner} if any(map(_is_dropout, inner)) else {}
        elif _is_dropout(key) and type(value) in (int, float) and value != dropout:
            found[key] = dropout
    return found


def _is_dropout(key: Any) -> bool:
    """Whether an entry is a probability of dropout: attention_dropout, resid_pdrop, dropout, ..."""
    return str(key).endswith(DROPOUT)


def active_dropout(model: nn.Module) -> int:
    """At how many places of a model something is dropped in training."""
    parts = [
        vars(one) | ({"dropout": one.p} if isinstance(one, nn.Dropout) else {})
        for one in model.modules()
    ]
    return sum(
        _is_dropout(key) and isinstance(value, float) and value > 0
        for part in parts
        for key, value in part.items()
    )
