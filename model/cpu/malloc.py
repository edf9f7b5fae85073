"""What glibc's malloc keeps of the memory that a process frees. Elsewhere nothing happens."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Of glibc's malloc.h."""
LARGEST_KEPT, LARGEST_KEPT_OF_SHARDS = 32 << 20, 1 << 20
"""Bytes of an allocation. glibc accepts no more than the first."""


def use_one_heap() -> None:
    """Make malloc use one heap for all threads: each that uploads would keep what it has freed."""
    _call_glibc("mallopt", M_ARENA_MAX, 1)


def keep_freed_memory(sharded: bool) -> None:
    """Return what is free to the system; from now on malloc keeps what a step frees for the next.

    Every step allocates the same megabytes. The system would clear each returned page again, which
    takes 5 to 8 percent of a step in bf16. Only glibc returns pages like that; with another C
    library nothing happens. Under FSDP (`sharded`), which is there to save memory, only small
    allocations are kept.

    Call it only where steps are computed on the CPU, and when what the start needed is freed: a
    copy of the weights that has left for the device or was sharded would stay for ever.
    """
    _call_glibc("malloc_trim", 0)
    # Larger tensors are mappings of their own. In the heap they would leave holes that nothing else
    # fits: a process that trains 135 M parameters under FSDP took 3.9 GB of memory for 2.2.
    _call_glibc("mallopt", M_MMAP_THRESHOLD, LARGEST_KEPT_OF_SHARDS if sharded else LARGEST_KEPT)
    _call_glibc("mallopt", M_TRIM_THRESHOLD, -1)  # never


def _call_glibc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
