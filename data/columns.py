"""Which columns of a row hold its document."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from data.chunks import with_final_newline
from data.errors import BadRow, DataError
from data.messages import EXTRAS, conversation_of

PACKED, MASKED, CONVERSATIONS = DOCUMENT_MODES = ("packed", "masked", "conversations")
"""The values of `data.documents`."""
DEFAULT_COLUMN = "text"
MESSAGES, PAIR = "messages", ("prompt", "completion")
SHOWN_COLUMNS = 20
"""How many names of columns an error lists."""


@dataclass(frozen=True)
class TextColumn:
    """A column of texts. Each is a document; a row without text has none."""

    name: str
    """The value of `data.text_column`."""
    of_texts: ClassVar = True
    """Whether a plain text, or a column of texts, has such documents."""

    def among(self, columns: Collection[str]) -> list[str]:
        """The columns to read; none if a table with these columns has no such documents."""
        return [self.name] if self.name in columns else []

    def missing(self, source: str, columns: Iterable[str]) -> DataError:
        """The error for a table that has only other columns."""
        return DataError(
            f"data.text_column={self.name} is not a column of {source}. Its columns: "
            f"{_first(columns)}. Name one of them."
        )

    def document(self, row: Mapping[str, Any]) -> str:
        """The document of a row, with a final newline; empty if there is none.

        A row has at least those of its columns that are read. Raises BadRow for a value of another
        type.
        """
        text = row.get(self.name)
        if text is not None and not isinstance(text, str):
            raise BadRow(
                f"data.text_column={self.name} holds {type(text).__name__}, not text: {text!r:.40}",
                "Convert it to text, remove the row, or name another column with data.text_column",
            )
        return with_final_newline(_checked(self.name, text)) if text else ""


class MessagesColumn(TextColumn):
    """A column of conversations, each a list of messages; or two columns, prompt and completion.

    With what else a chat template reads of a row, in columns of their names. A document is one line
    of JSON, see `Conversation`.
    """

    of_texts: ClassVar = False

    def among(self, columns: Collection[str]) -> list[str]:
        turns = [name for names in self._turns_among(columns) for name in names]
        extras = [name for name in EXTRAS if name in columns and name not in turns]
        return [*turns, *extras] if turns else []

    def _turns_among(self, columns: Collection[str]) -> list[tuple[str, ...]]:
        """The columns that hold a conversation; of several choices a row has the first one."""
        choices = [(MESSAGES,), PAIR] if self.name == DEFAULT_COLUMN else [(self.name,)]
        return [names for names in choices if all(name in columns for name in names)]

    def missing(self, source: str, columns: Iterable[str]) -> DataError:
        if self.name != DEFAULT_COLUMN:
            return super().missing(source, columns)
        return DataError(
            f"data.documents=conversations needs a column {MESSAGES}, or {' and '.join(PAIR)}; "
            f"{source} has: {_first(columns)}. Name another one of messages with data.text_column."
        )

    def document(self, row: Mapping[str, Any]) -> str:
        choices = self._turns_among(row)
        turns = next((one for one in choices if any(row[name] is not None for name in one)), None)
        if turns is None:  # as where a row has no such column
            return ""
        # A field of CSV that is empty is a text.
        others = {name: row.get(name) for name in EXTRAS if name not in turns}
        extras = {name: value for name, value in others.items() if value not in (None, "")}
        conversation = conversation_of([row[name] for name in turns], extras)
        return _checked(self.name, conversation.as_json()) + "\n"


def _first(names: Iterable[str]) -> str:
    """The first names of columns."""
    return ", ".join(f"{name:.40}" for name in islice(names, SHOWN_COLUMNS))


def _checked(column: str, text: str) -> str:
    """The text. Raises BadRow if it has bytes of another encoding, or half of a character.

    Readers keep bytes that are not UTF-8 as `surrogateescape` has them.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        is_byte = 0xDC80 <= code <= 0xDCFF
        reason = f"byte 0x{code - 0xDC00:02x}" if is_byte else error.reason
        remedy = "Convert the file to UTF-8, or remove the row"
        raise BadRow(f"{column} is not UTF-8: {reason}", remedy) from error
    return text
