"""A conversation: its messages, and the other fields that a chat template reads.

A message may spell out a special token, which counts as text and ends no turn. While a template
renders, each such token stands between two *fences*, characters that the conversation does not
contain. That distinguishes it from the special tokens that the template writes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from data.errors import BadRow, DataError

Message = dict[str, Any]
"""One turn of a conversation: its `role`, its `content`, and other fields for the template."""
ASSISTANT = "assistant"
EXTRAS = ("tools", "documents")
"""Other fields that a chat template reads, each a list of objects."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names for the same field of a message; transformers passes all of them to a template."""
CALLS = "tool_calls"
INSTEAD_OF_CONTENT = (CALLS, "function_call", *REASONING)
"""A message with one of these needs no content."""
NO_EXTRAS: Mapping[str, Any] = MappingProxyType({})


class ChatError(DataError):
    """A conversation that the template or the loss cannot take: a sentence, without its row."""


class Conversation(NamedTuple):
    """The input of a chat template."""

    messages: Sequence[Message]
    extras: Mapping[str, Any] = NO_EXTRAS
    """`tools` and `documents`, as a chat template gets them."""

    @classmethod
    def from_json(cls, document: str) -> Conversation:
        """Parse the output of `as_json`."""
        found = json.loads(document)
        return cls(found) if isinstance(found, list) else cls(found.pop("messages"), found)

    def as_json(self) -> str:
        """The messages; with extras an object of all, by name. Dates of Parquet become texts."""
        content = {"messages": self.messages, **self.extras} if self.extras else self.messages
        return json.dumps(content, ensure_ascii=False, default=str)

    def and_then(self, messages: Sequence[Message]) -> Conversation:
        """This conversation, followed by more messages."""
        return self._replace(messages=[*self.messages, *messages])

    def up_to(self, count: int) -> Conversation:
        """This conversation's first messages."""
        return self._replace(messages=self.messages[:count])

    def fields_but(self, known: Collection[str]) -> set[str]:
        """Names of its optional fields, except those in `known`."""
        fields = set(self.extras).union(*self.messages)
        optional = [(name,) for name in (*EXTRAS, CALLS)] + [REASONING]
        return {
            next(name for name in names if name in fields)
            for names in optional
            if not fields.isdisjoint(names) and not any(name in known for name in names)
        }

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
    return Conversation(checked, {name: objects(name, extras[name]) for name in extras})


def _turns(prompt: Any, completion: Any) -> list[Message]:
    """A prompt and its completion as messages; either may already be a list of messages."""
    both = [("user", prompt), (ASSISTANT, completion)]
    if isinstance(prompt, list) and isinstance(completion, list):
        return prompt + completion
    return [message for role, side in both for message in _messages_of(role, side)]


def _messages_of(role: str, side: Any) -> list[Any]:
    """The messages of a prompt or a completion; what is none is the content of one."""
    if isinstance(side, list) and any(isinstance(one, dict) and "role" in one for one in side):
        return side
    return [{"role": role, "content": side}]


def _message(message: Any) -> Message:
    """A message without its null entries, as transformers gives it to a template.

    Raises ValueError for what is none.
    """
    if not isinstance(message, dict):
        raise ValueError("it has a message that is not an object")
    found = {str(key): value for key, value in message.items() if value is not None}
    if not isinstance(found.get("role"), str):
        raise ValueError("it has a message whose role is not a text")
    content = found.get("content")
    is_absent = content is None and not found.keys().isdisjoint(INSTEAD_OF_CONTENT)
    if not (is_absent or isinstance(content, str) or _are_objects(content)):
        raise ValueError("it has a message whose content is not a text")
    return found


def objects(name: str, value: Any) -> list[Any]:
    """The tools or documents of a row, perhaps as JSON. Raises BadRow for what they cannot be."""
    found = value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            found = json.loads(value)
    if not _are_objects(found):
        raise BadRow(
            f"{name} is not a list of objects: {value!r:.60}",
            f"A chat template reads {name} as a list of objects. Convert it to one, or rename the "
            "column",
        )
    return list(found)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


FIRST_PRIVATE = 0xE000


class Part(NamedTuple):
    """A part of a rendered text, without fences."""

    text: str
    as_text: bool
    """Whether its special tokens count as text."""
    begin: int
    """Index of its first character in the rendered text."""


class Fences(NamedTuple):
    """Two characters to put around a special token that a message spells out."""

    begin: str
    end: str

    def around(
        self, conversation: Conversation, in_replies: Iterable[str], elsewhere: Iterable[str]
    ) -> Conversation:
        """A conversation with fences around some special tokens."""
        patterns = {True: any_of(in_replies), False: any_of(elsewhere)}

        def change(text: str, in_reply: bool = False) -> str:
            return patterns[in_reply].sub(rf"{self.begin}\g<0>{self.end}", text)

        messages = [
            replaced(one, partial(change, in_reply=one["role"] == ASSISTANT))
            for one in conversation.messages
        ]
        return Conversation(messages, replaced(conversation.extras, change))

    def without(self, text: str) -> str:
        """A rendered text without its fences."""
        return text.replace(self.begin, "").replace(self.end, "")

    def parts(self, text: str, marks: re.Pattern[str]) -> Iterator[Part]:
        """A rendered text, cut at its fences: a token between two of them is a part of its own.

        A fence that a template has left without its other one is dropped.
        """
        fence, begin = f"[{self.begin}{self.end}]", 0
        for match in re.finditer(rf"{self.begin}({marks.pattern}){self.end}|{fence}|\Z", text):
            if match.start() > begin:
                yield Part(text[begin : match.start()], False, begin)
            if match[1]:
                yield Part(match[1], True, match.start(1))
            begin = match.end()


def any_of(marks: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of these texts, the longest first."""
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def unused_fences(conversation: Conversation, template: str) -> Fences:
    """Fences that occur neither in a conversation nor in its template."""
    used = set(template).union(*strings_in([*conversation.messages, conversation.extras]))
    unused = (chr(i) for i in range(FIRST_PRIVATE, sys.maxunicode + 1) if chr(i) not in used)
    return Fences(next(unused), next(unused))


def fenced(
    conversation: Conversation,
    marks: re.Pattern[str],
    ends: Collection[str],
    writable: Collection[str],
    template: str,
    render: Callable[[Conversation], str],
) -> tuple[Conversation, Fences | None]:
    """A conversation with fences around the special tokens that it spells out, if there are any.

    Some templates look for a special token in a reply, such as `</think>`. That token gets no
    fences, unless it is in `ends`, which end a turn. `writable` tokens, such as `<tool_call>`, get
    none in replies, and elsewhere none if the template looks for them. Raises ChatError if the text
    without fences differs from the template's own.
    """
    strings = strings_in([*conversation.messages, conversation.extras])
    spelled = {mark for text in strings for mark in marks.findall(text)}
    if not spelled:
        return conversation, None
    fences, plain = unused_fences(conversation, template), render(conversation)

    def is_alike(changed: Conversation) -> bool:
        try:
            return fences.without(render(changed)) == plain
        except ChatError:
            return False

    in_replies = spelled.difference(writable)
    if is_alike(found := fences.around(conversation, in_replies, spelled)):
        return found, fences

    def looked_for(marks: Iterable[str], in_reply: bool) -> set[str]:
        around = ((one, [one] * in_reply, [one] * (not in_reply)) for one in marks)
        return {one for one, *where in around if not is_alike(fences.around(conversation, *where))}

    read = looked_for(in_replies, in_reply=True)
    elsewhere = spelled - looked_for(spelled.intersection(writable), in_reply=False)
    found = fences.around(conversation, in_replies - read, elsewhere)
    if read.isdisjoint(ends) and is_alike(found):
        return found, fences
    raise ChatError(
        f"the chat template changes a message that spells out {' or '.join(sorted(spelled))}, so "
        "it cannot be encoded as text. Reword the message"
    )
