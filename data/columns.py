"""The columns of a table or a data set in which its documents are."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from data.errors import DataError
from data.pieces import with_final_newline

Message = dict[str, Any]
"""One turn of a conversation: a `role`, its `content`, and what else a chat template reads."""
PACKED, SEPARATE, CONVERSATIONS = DOCUMENT_MODES = ("packed", "separate", "conversations")
"""The values of `data.documents`."""
DEFAULT_COLUMN = "text"
MESSAGES, PAIR = "messages", ("prompt", "completion")


@dataclass(frozen=True)
class Column(ABC):
    """How a row becomes a document. `name` is the value of `data.text_column`."""

    name: str

    @property
    @abstractmethod
    def key(self) -> str:
        """Part of the key of a cached text."""

    @abstractmethod
    def find(self, source: str, columns: list[str]) -> list[str]:
        """The columns to read. Raises DataError if the source has not got them."""

    @abstractmethod
    def document(self, row: dict[str, Any], number: int, source: str) -> str:
        """The document of a row, with a final newline; empty if there is none.

        Rows are numbered from 1. Raises DataError for a value of another type.
        """

    @abstractmethod
    def check_plain_text(self, source: str) -> None:
        """Raise DataError if a source without columns has no documents of this kind."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Columns whose values are texts."""
        return (self.name,)

    def csv_options(self) -> dict[str, Any]:
        """Options for CSV, without which pandas drops texts such as "NA" and turns "007" into 7."""
        return {"keep_default_na": False, "converters": dict.fromkeys(self.texts, str)}


def no_column(source: str, name: str, columns: list[str]) -> DataError:
    """The error for a column that does not exist."""
    return DataError(
        f"data.text_column={name} is not a column of {source}. Its columns: {', '.join(columns)}."
    )


class TextColumn(Column):
    """A column of texts. A row without text is not a document."""

    @property
    def key(self) -> str:
        return self.name

    def find(self, source: str, columns: list[str]) -> list[str]:
        if self.name not in columns:
            raise no_column(source, self.name, columns)
        return [self.name]

    def document(self, row: dict[str, Any], number: int, source: str) -> str:
        text = row[self.name]
        if not isinstance(text, str | None):
            raise DataError(
                f"data.text_column={self.name} of {source} holds {type(text).__name__}, not text: "
                f"{text!r:.40}. Name a column of text."
            )
        return with_final_newline(text) if text else ""

    def check_plain_text(self, source: str) -> None:
        pass


class MessagesColumn(Column):
    """A column of conversations, each a list of messages; or two columns, prompt and completion.

    A document is one line of JSON: its messages.
    """

    @property
    def key(self) -> str:
        return f"conversations\0{self.name}"

    @property
    def texts(self) -> tuple[str, ...]:
        return PAIR

    def find(self, source: str, columns: list[str]) -> list[str]:
        chosen = MESSAGES if self.name == DEFAULT_COLUMN else self.name
        if chosen in columns:
            return [chosen]
        if self.name == DEFAULT_COLUMN and set(PAIR) <= set(columns):
            return list(PAIR)
        if self.name != DEFAULT_COLUMN:
            raise no_column(source, self.name, columns)
        wanted = f"a column {MESSAGES}, or the columns {' and '.join(PAIR)}"
        raise DataError(
            f"data.documents=conversations needs {wanted}; data.source={source} has: "
            f"{', '.join(columns)}. Name another column of messages with data.text_column."
        )

    def document(self, row: dict[str, Any], number: int, source: str) -> str:
        values = list(row.values())
        messages = values[0] if len(values) == 1 else _turns(*values)
        try:
            if not isinstance(messages, list):
                raise ValueError("no list of messages")
            checked = [_message(message) for message in messages]
        except ValueError as error:
            raise DataError(
                f"data.source={source}, row {number}: {error}: {messages!r:.60}. "
                "A message is an object with the texts role and content."
            ) from error
        return json.dumps(checked, ensure_ascii=False) + "\n"

    def check_plain_text(self, source: str) -> None:
        raise DataError(
            f"data.documents=conversations needs rows with {MESSAGES}, and data.source={source} is "
            "plain text. Name JSON lines, Parquet or a data set of the Hub."
        )


def _turns(prompt: Any, completion: Any) -> list[Message]:
    """A prompt and its completion as messages; both may be lists of messages already."""
    if isinstance(prompt, list) and isinstance(completion, list):
        return prompt + completion
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def _message(message: Any) -> Message:
    """A message without what it has not got. Raises ValueError for what is none."""
    if not isinstance(message, dict):
        raise ValueError("a message that is not an object")
    found = {str(key): value for key, value in message.items() if value is not None}
    for key in ("role", "content"):
        if not isinstance(found.get(key), str):
            raise ValueError(f"a message whose {key} is not a text")
    return found
