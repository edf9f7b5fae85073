"""The errors of this package that users can resolve."""

import errno


class SnapshotError(ValueError):
    """A snapshot that cannot be used. The message names the folder, the fault and the remedy."""


class DiskFault(SnapshotError):
    """A disk of this machine refuses a download; the snapshot itself may be whole."""


class NumberFault(SnapshotError):
    """A number in the tensors of a snapshot is out of bounds, or not finite."""


class Unresumable(SnapshotError):
    """Training does what no snapshot can resume from: each later one would fail alike."""


class OtherRun(SnapshotError):
    """A snapshot of another run than the one that starts, whatever else holds of it."""


def is_full(error: OSError) -> bool:
    """Whether a disk refuses for lack of space, and not because nobody may write there."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
