"""Special tokens that the messages of a conversation spell out, which count as text.

While a template renders, each stands between two characters that the conversation does not contain.
That distinguishes it from the special tokens that the template writes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from data.messages import ASSISTANT, ChatError, Conversation, replaced, strings_in

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
        """A rendered text, cut at its fences. A template may have left one of a pair alone."""
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
    ends: Iterable[str],
    template: str,
    render: Callable[[Conversation], str],
) -> tuple[Conversation, Fences | None]:
    """A conversation with fences around the special tokens that it spells out, if there are any.

    Some templates look for a special token in a reply, such as `</think>`. That token gets no
    fences, unless it is in `ends`, which end a turn. Raises ChatError if the text without fences
    differs from the template's own.
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

    if is_alike(found := fences.around(conversation, spelled, spelled)):
        return found, fences
    read = {mark for mark in spelled if not is_alike(fences.around(conversation, [mark], []))}
    found = fences.around(conversation, spelled - read, spelled)
    if read.isdisjoint(ends) and is_alike(found):
        return found, fences
    raise ChatError(
        f"the chat template changes a message that spells out {' or '.join(sorted(spelled))}, so "
        "it cannot be encoded as text. Reword the message"
    )
