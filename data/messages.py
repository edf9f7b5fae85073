"""A conversation: its messages, and the other fields that a chat template reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from data.errors import BadRow, DataError

Message = dict[str, Any]
"""One turn of a conversation: its `role`, its `content`, and other fields for the template."""
ASSISTANT = "assistant"
EXTRAS = ("tools", "documents")
"""Other fields that a chat template reads, each a list of objects."""
INSTEAD_OF_CONTENT = (
    *("tool_calls", "function_call"),
    *("reasoning_content", "thinking", "reasoning"),  # names of one field
)
"""A message with one of these needs no content."""


class ChatError(DataError):
    """A conversation that the template or the loss cannot take: a sentence, without its row."""


class Conversation(NamedTuple):
    """The input of a chat template."""

    messages: Sequence[Message]
    extras: Mapping[str, Any] = MappingProxyType({})
    """`tools` and `documents`, as a chat template gets them."""

    @classmethod
    def from_json(cls, document: str) -> Conversation:
        """Parse the output of `as_json`."""
        content = json.loads(document)
        return cls(content) if isinstance(content, list) else cls(content.pop("messages"), content)

    def as_json(self) -> str:
        """The messages; with extras an object of all, by name. Dates of Parquet become texts."""
        content = {"messages": self.messages, **self.extras} if self.extras else self.messages
        return json.dumps(content, ensure_ascii=False, default=str)

    def up_to(self, count: int) -> Conversation:
        """This conversation's first messages."""
        return self._replace(messages=self.messages[:count])

    @property
    def ends_of_replies(self) -> list[int]:
        """How many messages there are up to each reply, itself included."""
        roles = enumerate((message["role"] for message in self.messages), start=1)
        return [number for number, role in roles if role == ASSISTANT]


def texts_in(value: Any) -> Iterator[str]:
    """Every text among the values of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from texts_in(entry)


def conversation_of(values: Sequence[Any], extras: Mapping[str, Any]) -> Conversation:
    """A conversation from its messages, or from a prompt and its completion. Raises BadRow."""
    messages = values[0] if len(values) == 1 else _turns(*values)
    try:
        if not isinstance(messages, list):
            raise ValueError("it has no list of messages")
        checked = [_message(message) for message in messages]
    except ValueError as error:
        raise BadRow(
            f"{error}: {messages!r:.60}",
            "A message is an object: role is a text, content a text or a list of parts",
        ) from error
    return Conversation(checked, {name: _objects(name, extras[name]) for name in extras})


def _turns(prompt: Any, completion: Any) -> list[Any]:
    """A prompt and its completion as messages; either may already be a list of messages."""
    turns: list[Any] = []
    for role, side in (("user", prompt), (ASSISTANT, completion)):
        entries = side if isinstance(side, list) else []
        are_messages = any(isinstance(one, dict) and "role" in one for one in entries)
        turns += side if are_messages else [{"role": role, "content": side}]
    return turns


def _message(message: Any) -> Message:
    """A message without its null entries, as transformers gives it to a template.

    Raises ValueError for what is none.
    """
    if not isinstance(message, dict):
        raise ValueError("it has a message that is not an object")
    entries = {str(key): value for key, value in message.items() if value is not None}
    if not isinstance(entries.get("role"), str):
        raise ValueError("it has a message whose role is not a text")
    content = entries.get("content")
    is_absent = content is None and not entries.keys().isdisjoint(INSTEAD_OF_CONTENT)
    if not (is_absent or isinstance(content, str) or _are_objects(content)):
        raise ValueError("it has a message whose content is not a text")
    return entries


def _objects(name: str, value: Any) -> list[Any]:
    """The tools or documents of a row, perhaps as JSON. Raises BadRow for what they cannot be."""
    objects = value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            objects = json.loads(value)
    if not _are_objects(objects):
        raise BadRow(
            f"{name} is not a list of objects: {value!r:.60}",
            f"A chat template reads {name} as a list of objects. Convert it to one, or rename the "
            "column",
        )
    return list(objects)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
