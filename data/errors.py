"""The one error of this room that is the user's to mend."""


class DataError(ValueError):
    """A text that cannot be used. The message names the key, the value and the remedy."""
