"""config.json as programs with transformers 4 read it, such as servers of last year.

transformers 5 writes rotations as `rope_parameters` and the dtype as `dtype`; version 4 knows
neither and silently takes its defaults. Both forms stand side by side.
"""

from __future__ import annotations

from typing import Any

ROTATIONS, THETA, SCALING = "rope_parameters", "rope_theta", "rope_scaling"
PART = "partial_rotary_factor"
KINDS = {"full_attention": THETA, "sliding_attention": "rope_local_base_freq"}
"""Version 4's entry for the base of each kind of layer, where a model has several."""


def with_older_entries(content: dict[str, Any]) -> dict[str, Any]:
    """The entries of a config.json, and those of version 4 where they are missing."""
    older: dict[str, Any] = {}
    if "dtype" in content:
        older["torch_dtype"] = content["dtype"]
    if isinstance(rotations := content.get(ROTATIONS), dict):
        older |= _of_rotations(rotations)
    return {**older, **content}


def _of_rotations(rotations: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta`, and `rope_scaling` unless the rotations are plain."""
    if rotations.keys() & KINDS.keys():
        bases = {
            KINDS[kind]: of_kind[THETA]
            for kind, of_kind in rotations.items()
            if kind in KINDS and isinstance(of_kind, dict) and THETA in of_kind
        }
        full = rotations.get("full_attention")
        return bases | (_of_rotations(full) if isinstance(full, dict) else {})
    rest = {key: value for key, value in rotations.items() if key != THETA}
    scales = rest.get("rope_type", "default") != "default"
    base = {key: rotations[key] for key in (THETA, PART) if key in rotations}
    return base | ({SCALING: rest} if scales else {})
