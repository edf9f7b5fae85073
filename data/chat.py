"""Conversations as tokens: rendered by the tokenizer's chat template, with their targets marked.

transformers renders the template, in a sandbox, and is imported only for that. A special token that
a message spells out is encoded in two parts, so that no message can end a turn: marks stand around
it while the template is rendered, which may look for it. (transformers' own
`apply_chat_template(sanitize_control_tokens=True)` cannot say which tokens are targets.)
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from datetime import date
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.printable import reason_of
from data.chunks import utf8_bytes
from data.errors import DataError
from data.messages import ASSISTANT, EMPTY, ChatError, Conversation
from data.subwords import SubwordTokenizer
from data.tokenizer import Tokenizer

UNMARKED = (
    "so the assistant's text cannot be located. Mark it in the template with {% generation %} and "
    "{% endgeneration %}"
)
OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Around a special token that a message spells. Unicode keeps these code points free."""
MARK = re.compile(f"[{OPEN}{CLOSE}]")
SPELLED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")
"""A template that takes a message apart may leave a mark alone, which then means nothing."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The template's mark for text that the assistant writes."""
PROBE, SHOWN = "the reply", 40
TRAINING_DATE = date(2024, 7, 26)
"""Today's date for templates in training. Llama's template uses it if it has no clock."""


Spans = list[tuple[int, int]]
"""Starts and ends of parts of a text, in characters."""


class EncodedChat(NamedTuple):
    """A conversation as tokens."""

    ids: NDArray
    trained: NDArray[np.uint8]
    """1 for each token that is a target: the assistant's, but for the very first; else 0."""
    text_bytes: int
    """Bytes of the targets' text in UTF-8; special tokens have none."""
    is_shortened: bool = False


class ChatTemplate:
    """Renders and encodes conversations."""

    def __init__(self, tokenizer: Tokenizer | None, where: str, today: date | None = None) -> None:
        """`where` names the tokenizer, `today` is the date that the template may write.

        Raises DataError if the tokenizer has no chat template.
        """
        templates = tokenizer.chat_templates if isinstance(tokenizer, SubwordTokenizer) else {}
        if "default" not in templates:
            raise DataError(
                f"{where} has no chat template, which formats conversations as text. Name a model "
                "or a tokenizer that has one; their names often end in -Instruct or -it."
            )
        if find_spec("transformers") is None:
            raise DataError(
                "conversations need transformers, which renders chat templates. "
                "Install it with: pip install -r requirements-models.txt"
            )
        assert isinstance(tokenizer, SubwordTokenizer)
        self.tokenizer, self.templates, self.today = tokenizer, templates, today

    def stops(self, conversation: Conversation = EMPTY) -> frozenset[int]:
        """The tokens that end a reply after a conversation and a question.

        They are the end-of-text token and the first mark that the template writes after a reply.
        """
        turns = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": PROBE}]
        after = self._after_probes(conversation.and_then(turns))[-1:]
        ids, _ = self.tokenizer.encode_parts((text, 0) for text in after)
        marks = {self.tokenizer.added_tokens[text] for text in self._unwritable}
        end_of_text = self.tokenizer.marks[self.tokenizer.special_tokens["eos_token"]]
        ends = [number for number in ids if number in marks][:1]
        return frozenset([*ends, end_of_text])

    def _after_probes(self, conversation: Conversation) -> list[str]:
        """What the template writes after each probe in a conversation.

        Nothing if it takes no such conversation, or leaves out a content that is a text.
        """
        try:
            return self._render(conversation)[0].split(PROBE)[1:]
        except ChatError:  # a template that asks for more than that
            return []

    @cached_property
    def _unwritable(self) -> set[str]:
        """The tokens that no message may write: special ones, and those between messages.

        Some models' marks of roles are added tokens that are not special. Others, such as <think>,
        are for a reply to write.
        """
        turns = [{"role": role, "content": PROBE} for role in ("user", ASSISTANT, "user")]
        # Before the first message is perhaps a system prompt, which may explain <think>.
        between = self._after_probes(EMPTY.and_then(turns)) or [*self.templates.values()]
        # Gemma has tokens for line ends, which are no marks.
        added = filter(str.strip, self.tokenizer.added_tokens)
        return {text for text in added if any(text in part for part in between)}.union(
            self.tokenizer.marks
        )

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """What no message may write, longer tokens first."""
        return re.compile("|".join(map(re.escape, sorted(self._unwritable, key=len, reverse=True))))

    @cached_property
    def _starts(self) -> re.Pattern[str]:
        """Each place where such a token begins, perhaps within another."""
        return re.compile(f"(?=({self._pattern.pattern}))")

    def _marked(self, value: Any) -> Any:
        """JSON with marks around what no message may write. Raises ChatError if it has one already.

        So it does for a token of one character, which cannot be cut in two.
        """
        if isinstance(value, Mapping):
            return {self._marked(name): self._marked(one) for name, one in value.items()}
        if isinstance(value, list):
            return [self._marked(one) for one in value]
        if not isinstance(value, str):
            return value
        if found := MARK.search(value):
            what = f"it has U+{ord(found[0]):04X}, which stands for no character: leave it out"
            raise ChatError(what)
        if self._pattern.search(value) is None:  # far faster than a search for all places
            return value
        spans: Spans = []
        for start in self._starts.finditer(value):
            if len(start[1]) == 1:
                raise ChatError(f"it writes {start[1]!r}, a special token of one character")
            begin, end = start.span(1)
            if spans and begin < spans[-1][1]:  # in one region with a token that it overlaps
                begin, before = spans.pop()
                end = max(end, before)
            spans.append((begin, end))
        for begin, end in reversed(spans):
            value = value[:begin] + OPEN + value[begin:end] + CLOSE + value[end:]
        return value

    def _without_marks(self, text: str) -> tuple[str, list[int], list[int]]:
        """A rendered text without marks, where those were in it, and where the text is cut."""
        marks = [mark.start() for mark in MARK.finditer(text)]
        cuts = [
            spelled.start(1) + start.start() + 1  # behind the first character of each token
            for spelled in SPELLED.finditer(text)
            if self._starts.match(spelled[1])
            for start in self._starts.finditer(spelled[1])
        ]
        return MARK.sub("", text), marks, [_moved(cut, marks) for cut in cuts]

    def _safe(self, conversation: Conversation) -> Conversation:
        """A conversation that writes no special tokens."""
        return Conversation(
            self._marked([*conversation.messages]), self._marked(conversation.extras)
        )

    def _render(
        self, conversation: Conversation, reply: bool = False, track: bool = False
    ) -> tuple[str, Spans]:
        """The text of a conversation; with `reply` it ends where the assistant begins to write.

        With `track` also where the text is between marks of `{% generation %}`. Raises ChatError if
        the template refuses the conversation.
        """
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template  # its annotation is wrong
        template = self._template_for(conversation)
        try:
            if self.today is not None:  # with the clock, a text would have other tokens tomorrow
                compiled = chat_template_utils._compile_jinja_template(template)
                compiled.globals["strftime_now"] = self.today.strftime
            texts, spans = render(
                [list(conversation.messages)],
                chat_template=template,
                add_generation_prompt=reply,
                return_assistant_tokens_mask=track,
                **conversation.extras,
                **self.tokenizer.special_tokens,
            )
        except Exception as error:  # templates and jinja raise errors of any type
            raise ChatError(f"the chat template refuses it: {reason_of(error):.200}") from error
        return texts[0], [tuple(span) for span in spans[0]] if track else []

    def _template_for(self, conversation: Conversation) -> str:
        """The template: with tools, the one that is named tool_use, as transformers chooses it."""
        named = "tool_use" if "tools" in conversation.extras else "default"
        return self.templates.get(named, self.templates["default"])

    def _unmarked(self, conversation: Conversation, text: str) -> Spans:
        """Where the text of a conversation is the assistant's, if its template marks nothing.

        It is what the template adds after the start of a reply when the message is there. Raises
        ChatError if it cannot be located so.
        """
        spans = []
        for end in conversation.ends_of_replies:
            before, _ = self._render(conversation.up_to(end - 1), reply=True)
            after, _ = self._render(conversation.up_to(end))
            if not (after.startswith(before) and text.startswith(after)):
                raise ChatError(
                    f"the chat template writes turn {end} differently when it only begins the "
                    f"reply ({before[-SHOWN:]!r}), or when other turns follow, {UNMARKED}"
                )
            spans.append((len(before), len(after)))
        return spans

    def encode_prompt(self, conversation: Conversation) -> NDArray:
        """The tokens (T,) after which the assistant writes its reply. Raises ChatError."""
        text, _ = self._render(self._safe(conversation), reply=True)
        plain, _, cuts = self._without_marks(text)
        ids, _ = self.tokenizer.encode_parts(_divided(plain, 0, len(plain), cuts))
        return np.array(ids, dtype=self.tokenizer.dtype)

    def encode(self, conversation: Conversation, longest: int) -> EncodedChat | None:
        """The tokens of a conversation up to its last reply, at most so many.

        A longer one loses its last turns, up to an earlier reply. None if its first reply does not
        fit, or if its replies have no tokens. Raises ChatError.
        """
        replies = conversation.ends_of_replies
        if not replies:
            what = "reply to train on" if conversation.messages else "messages"
            raise ChatError(f"it has no {what}")
        conversation = self._safe(conversation)
        has_marks = GENERATION.search(self._template_for(conversation)) is not None
        for end in reversed(replies):
            part = conversation.up_to(end)
            text, spans = self._render(part, track=has_marks)
            plain, marks, cuts = self._without_marks(text)
            ids, places = self.tokenizer.encode_parts(_divided(plain, 0, len(plain), cuts))
            if len(ids) <= longest:
                break
        else:
            return None
        if not has_marks:
            spans = self._unmarked(part, text)
        elif not spans:
            raise ChatError("the chat template marks no assistant text by {% generation %}")
        spans = [(_moved(begin, marks), _moved(end, marks)) for begin, end in spans]
        trained = _targets(places, spans)
        said = (one for begin, end in spans for one, _ in _divided(plain, begin, end, cuts))
        size = sum(utf8_bytes(self._pattern.sub("", one)) for one in said)
        tokens = np.array(ids, dtype=self.tokenizer.dtype)
        chat = EncodedChat(tokens, trained, size, is_shortened=end < replies[-1])
        return chat if trained.any() else None


def _moved(place: int, marks: list[int]) -> int:
    """A place in a text, in the same text without what stands at the places of the marks."""
    return place - bisect_left(marks, place)


def _divided(text: str, begin: int, end: int, cuts: list[int]) -> list[tuple[str, int]]:
    """The parts of a part of a text between the cuts, each with the place where it begins."""
    places = [begin, *(cut for cut in cuts if begin < cut < end), end]
    return [(text[first:then], first) for first, then in pairwise(places)]


def _targets(places: Spans, spans: Spans) -> NDArray[np.uint8]:
    """1 for each token that has a character of the assistant, as in transformers; else 0."""
    begins, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
    trained = np.zeros(len(begins), dtype=np.uint8)
    for begin, end in spans:
        if begin < end:
            trained[(begins < end) & (ends > begin)] = 1
    trained[:1] = 0  # nothing predicts the first token
    return trained
