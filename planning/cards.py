"""The memory of GPUs by name, for a plan without the GPU."""

from __future__ import annotations

CARDS = {
    "b200": 178.35,
    "h200": 139.80,
    "h100": 79.15,
    "h100nvl": 93.10,
    "a100": 79.15,
    "a10040gb": 39.39,
    "l40s": 44.39,
    "a6000": 47.40,
    "l4": 22.03,
    "a10g": 22.06,
    "rtx5090": 31.36,
    "rtx4090": 23.52,
    "rtx3090": 23.56,
    "v100": 31.73,
    "t4": 14.75,
}
"""GiB that a process can use: the "total capacity" in torch's out-of-memory errors.

The figures are from public reports. It is what the driver leaves of the nominal size, and varies by
about 0.1 GiB with the driver.
"""
