"""Limits how long the threads of a CPU spin while they wait for each other. Import before torch.

A layer of a small model ends after some 50 microseconds, at a barrier of all threads. By default
GNU's OpenMP library spins for milliseconds there. That is fast while each thread has a core. Where
another program has one of the cores, a thread that spins keeps the one that it waits for from
running, and training slows down twentyfold or more. After these spins, a thread sleeps instead.

The library reads the environment once, when torch loads it. It is GNU's in torch's builds for
Linux; others do not know the variable. The results do not depend on it.
"""

from __future__ import annotations

import os

SPINS = 2000
"""Some 30 to 90 microseconds, depending on the processor."""

if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)
