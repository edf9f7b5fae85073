"""The sources of a run that streams its text: their rows, and what the order follows from."""

from __future__ import annotations

from collections.abc import Sequence

from config.schema import Config, MixPart
from data.columns import MASKED
from data.errors import DataError
from data.public_names import public_name
from data.reading.access import Access
from data.reading.groups import TRAIN, Listing
from data.reading.listing import list_source
from data.streaming.windows import StreamDefinition
from data.tokenizer import Tokenizer


def parts_of(config: Config) -> Sequence[MixPart]:
    """The sources of a streamed text."""
    return config.data.mix or [MixPart(config.data.source)]


def names_of(config: Config) -> list[str]:
    """The sources of a streamed text, as a snapshot names them."""
    return [public_name(part.source) for part in parts_of(config)]


def list_stream(
    config: Config, access: Access, revisions: Sequence[str | None], split: str = TRAIN
) -> list[Listing]:
    """The rows of each source of a stream, at its revision. Raises DataError."""
    data = config.data
    return [
        list_source(
            part.source,
            part.text_column or data.text_column,
            access,
            revision,
            split,
            data.skip_broken,
        )
        for part, revision in zip(parts_of(config), revisions, strict=True)
    ]


def list_held_out(config: Config, access: Access, revisions: Sequence[str | None]) -> list[Listing]:
    """The rows of `data.held_out_split`, at the commits of what is trained on.

    So they are the same whenever the branch moves. Raises DataError.
    """
    split = config.data.held_out_split
    return [] if split is None else list_stream(config, access, revisions, split)


def define_stream(
    config: Config,
    listings: list[Listing],
    held_out: list[Listing],
    tokenizer: Tokenizer,
    seed: int,
) -> StreamDefinition:
    """What the rows of a stream and their order follow from."""
    data = config.data
    return StreamDefinition(
        listings,
        [part.weight for part in parts_of(config)],
        tokenizer,
        seed=seed,
        val_fraction=data.val_fraction,
        window_bytes=data.window_bytes,
        held_out_bytes=data.held_out_bytes,
        held_out=held_out,
        skip_broken=data.skip_broken,
        masks=data.documents == MASKED,
    )


def refuse_shared_files(listings: list[Listing], held_out: list[Listing]) -> None:
    """Raise DataError if a file is trained on and held out."""
    trained = {file.url for listing in listings for file in listing.files}
    for listing in held_out:
        for file in listing.files:
            if file.url in trained:
                raise DataError(
                    f"data.held_out_split: {file.name} of {listing.name} is in the split that is "
                    "trained on as well. Choose another split, or leave it out."
                )
