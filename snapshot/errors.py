"""The one error of this room that is the user's to mend."""


class SnapshotError(ValueError):
    """A snapshot that cannot be used. The message names the folder, the fault and the remedy."""
