"""A conversation: its messages, and what else a chat template reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from data.errors import DataError

Message = dict[str, Any]
"""One turn of a conversation: a `role`, its `content`, and what else a chat template reads."""
ASSISTANT = "assistant"
NO_EXTRAS: Mapping[str, Any] = MappingProxyType({})


class ChatError(DataError):
    """A conversation that the template or the loss cannot take: a sentence, without its row."""


class Conversation(NamedTuple):
    """What a chat template renders."""

    messages: Sequence[Message]
    extras: Mapping[str, Any] = NO_EXTRAS
    """`tools` and `documents`, as a chat template gets them."""

    def up_to(self, count: int) -> Conversation:
        """Its first messages."""
        return self._replace(messages=self.messages[:count])

    @property
    def ends_of_replies(self) -> list[int]:
        """How many messages there are up to each reply, itself included."""
        roles = enumerate((message["role"] for message in self.messages), start=1)
        return [number for number, role in roles if role == ASSISTANT]


EMPTY = Conversation(())


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a value of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        for entry in value.values():
            yield from strings_in(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from strings_in(entry)


def replaced(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON, each string of it changed by a function, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): replaced(entry, change) for key, entry in value.items()}
    return [replaced(entry, change) for entry in value] if isinstance(value, list) else value
