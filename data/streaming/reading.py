"""The texts of one group of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from data.errors import BrokenText, DataError
from data.pieces import with_final_newline
from data.streaming.access import URL, Access
from data.streaming.groups import Group, GroupText, Listing
from data.streaming.lines import rows_of, value_of
from data.streaming.parquet import MOST_GROUP_BYTES, read_rows


def read_group(
    listing: Listing, group: Group, access: Access, skip_broken: bool = False
) -> GroupText:
    """The texts of a group; only its bytes are read, and of Parquet only the column of text.

    With `skip_broken` a line that is no row is left out, and a group that cannot be decoded: the
    same at every start. A group that cannot be fetched is waited for, or ends the run.

    Raises DataError if the group is broken, has changed or vanished, or is refused.
    """
    file = listing.files[group.file]
    error = _try_to_decode(listing, group, access, found := GroupText([], []))
    if error is not None and URL.match(file.url):  # not the file, perhaps, but what arrived of it
        error = _try_to_decode(listing, group, access, found := GroupText([], []))
    if error is None:
        return found
    if not skip_broken:
        raise BrokenText(
            f"data.source={listing.name}: group {group.index} of {file.name} cannot be read: "
            f"{_reason(error)}. Repair the file, or leave out what is broken with "
            "data.skip_broken=true."
        ) from error
    bad: list[str] = []
    of_group = f"group {group.index} of {file.name}"
    error = _try_to_decode(listing, group, access, found := GroupText([], []), bad)
    if error is not None:
        return GroupText([], [], f"{of_group}: {_reason(error)}")
    others = f" and {len(bad) - 1:,} more" if len(bad) > 1 else ""
    return replace(found, broken=f"{bad[0]}{others} in {of_group}" if bad else "")


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _try_to_decode(
    listing: Listing,
    group: Group,
    access: Access,
    found: GroupText,
    bad: list[str] | None = None,
) -> Exception | None:
    """Append the rows of a group that have text. Returns the error if it cannot be decoded.

    With `bad` a line that is no row is no error: it is appended there.
    """
    size = 0
    try:
        for number, value in enumerate(_values(listing, group, access, bad is not None)):
            if isinstance(value, BrokenText):
                assert bad is not None
                bad.append(f"row {number:,} ({_reason(value)})" if not bad else "")
            elif value:
                size += len(value) if value.isascii() else len(value.encode())
                if size > MOST_GROUP_BYTES:
                    raise BrokenText(f"its text has more than {MOST_GROUP_BYTES / 1e9:.0f} GB")
                found.texts.append(with_final_newline(value))
                found.rows.append(number)
    except (ValueError, OSError) as error:  # of pyarrow and the decoders
        if isinstance(error, DataError) and not isinstance(error, BrokenText):
            raise
        return error
    return None


def _values(
    listing: Listing, group: Group, access: Access, lenient: bool
) -> Iterator[str | BrokenText | None]:
    """The text of each row of a group; if `lenient`, the error of a line that is no row."""
    name, column, file = listing.name, listing.column, listing.files[group.file]
    if listing.format == "parquet":
        for values in read_rows(access, name, column, file, group):
            yield from values
        return
    for line in rows_of(access, name, file, group):
        try:
            yield value_of(line, column)
        except BrokenText as error:
            if not lenient:
                raise
            yield error
