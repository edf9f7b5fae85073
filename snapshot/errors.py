"""The errors of this package that users can resolve."""


class SnapshotError(ValueError):
    """A snapshot that cannot be used. The message names the folder, the fault and the remedy."""


class DiskFault(SnapshotError):
    """A disk of this machine refuses a download; the snapshot itself may be whole."""


class OtherRun(SnapshotError):
    """A snapshot of another run than the one that starts, whatever else holds of it."""
