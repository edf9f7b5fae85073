"""The error of this package that users can resolve."""


class SnapshotError(ValueError):
    """A snapshot that cannot be used. The message names the folder, the fault and the remedy."""
