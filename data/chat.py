"""Conversations as tokens: rendered by the tokenizer's chat template, with their targets marked.

transformers renders the template, in a sandbox, and is imported only for that. A special token that
a message spells out is encoded in two parts, so that the message cannot end a turn: marks stand
around it while the template, which may look for it, is rendered. (transformers' own
`apply_chat_template(sanitize_control_tokens=True)` cannot say which tokens are targets.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.printable import reason_of
from data.chunks import utf8_bytes
from data.errors import DataError
from data.messages import ASSISTANT, ChatError, Conversation
from data.subwords import SubwordTokenizer
from data.tokenizer import Tokenizer

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Before and behind a token that a message spells. Unicode keeps these code points free."""
MARKS = f"[{OPEN}{CLOSE}]"
CUT = OPEN
"""Where a rendered text, which has lost its marks, is divided before it is encoded."""
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
        if not (isinstance(tokenizer, SubwordTokenizer) and "default" in tokenizer.chat_templates):
            raise DataError(
                f"{where} has no chat template, which formats conversations as text. Name a model "
                "or a tokenizer that has one; their names often end in -Instruct or -it."
            )
        if find_spec("transformers") is None:
            raise DataError(
                "conversations need transformers, which renders chat templates. "
                "Install it with: pip install -r requirements-models.txt"
            )
        self.tokenizer, self.templates, self.today = tokenizer, tokenizer.chat_templates, today
        self._longest_first = sorted(self._unwritable(), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, self._longest_first)))
        """What no message may write."""
        self._starts = re.compile(f"(?=({self._tokens.pattern}))")
        """Each place where such a token begins, perhaps within another."""
        reserved = [OPEN, CLOSE, *(token for token in self._longest_first if len(token) == 1)]
        self._reserved = re.compile("|".join(map(re.escape, reserved)))
        """A token of one character cannot be divided."""

    def _unwritable(self) -> set[str]:
        """The tokens that no message may write: special ones, and those between messages.

        Some models' marks of roles are added tokens that are not special. Others, such as <think>,
        are for a reply to write.
        """
        # Before the first message is perhaps a system prompt, which may explain <think>.
        between = self._after_probes("user", ASSISTANT, "user") or [*self.templates.values()]
        # Gemma has tokens for line ends, which are no marks.
        added = filter(str.strip, self.tokenizer.added_tokens)
        return {text for text in added if any(text in part for part in between)}.union(
            self.tokenizer.marks
        )

    def _after_probes(self, *roles: str) -> list[str]:
        """What the template writes after each message of a conversation between these roles.

        Nothing if it takes no such conversation, or leaves out a content that is a text.
        """
        messages = [{"role": role, "content": PROBE} for role in roles]
        try:
            return self._render(Conversation(messages))[0].split(PROBE)[1:]
        except ChatError:  # a template that asks for more than that
            return []

    def stops(self) -> frozenset[int]:
        """The tokens that end a reply: the end of a text, and the first mark after a reply."""
        after = "".join(self._after_probes("user", ASSISTANT)[-1:])
        ends = [self.tokenizer.added_tokens[text] for text in self._tokens.findall(after)[:1]]
        return frozenset([*ends, self.tokenizer.end_of_text])

    def _marked(self, value: Any) -> Any:
        """JSON with marks around each token that no message may write. Raises ChatError."""
        if isinstance(value, Mapping):
            return {self._marked(name): self._marked(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [self._marked(entry) for entry in value]
        if not isinstance(value, str):
            return value
        if reserved := self._reserved.search(value):
            raise ChatError(f"it has {reserved[0]!r}, which is reserved: leave it out")
        if self._tokens.search(value) is None:  # far faster than a search for all places
            return value
        spans = [start.span(1) for start in self._starts.finditer(value)]
        begins, ends = map(set, zip(*spans, strict=True))
        return "".join(
            CLOSE * (place in ends) + OPEN * (place in begins) + value[place : place + 1]
            for place in range(len(value) + 1)
        )

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        """Any mark, with the first character of its token if that stands between two of them.

        A template that takes a message apart may leave one alone, before a token of its own.
        Compiling takes a second where tokens are many, and few messages spell any.
        """
        # Between its characters are the marks of tokens that overlap it.
        tokens = "|".join(f"{MARKS}*".join(map(re.escape, text)) for text in self._longest_first)
        return re.compile(f"{OPEN}(?=(?:{tokens}){CLOSE})(.)|{MARKS}", re.DOTALL)

    def _divided(self, text: str) -> str:
        """A rendered text without marks, and with a cut in each token that a message spells."""
        if re.search(MARKS, text) is None:
            return text
        return self._marks.sub(lambda mark: mark[1] + CUT if mark[1] else "", text)

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
                shown = re.sub(MARKS, "", before)[-SHOWN:]
                raise ChatError(
                    f"the chat template writes turn {end} differently when it only begins the "
                    f"reply ({shown!r}), or when other turns follow, so the assistant's "
                    "text cannot be located. Mark it in the template with {% generation %} and "
                    "{% endgeneration %}"
                )
            spans.append((len(before), len(after)))
        return spans

    def encode_prompt(self, conversation: Conversation) -> NDArray:
        """The tokens (T,) after which the assistant writes its reply. Raises ChatError."""
        text, _ = self._render(self._safe(conversation), reply=True)
        ids, _ = self.tokenizer.encode_divided(self._divided(text), CUT)
        return np.array(ids, dtype=self.tokenizer.dtype)

    def encode(self, conversation: Conversation, longest: int) -> EncodedChat | None:
        """The tokens of a conversation up to its last reply, at most so many.

        A longer one loses its last turns, up to an earlier reply. None if its first reply does not
        fit, or if its replies have no tokens. Raises ChatError.
        """
        replies = conversation.ends_of_replies
        if not replies:
            raise ChatError("it has no reply to train on")
        conversation = self._safe(conversation)
        has_marks = GENERATION.search(self._template_for(conversation)) is not None
        for end in reversed(replies):
            part = conversation.up_to(end)
            text, spans = self._render(part, track=has_marks)
            divided = self._divided(text)
            ids, places = self.tokenizer.encode_divided(divided, CUT)
            if len(ids) <= longest:
                break
        else:
            return None
        if not has_marks:
            spans = self._unmarked(part, text)
        elif not spans:
            raise ChatError("the chat template marks no assistant text by {% generation %}")
        # The same places in the divided text.
        spans = [
            (len(self._divided(text[:begin])), len(self._divided(text[:end])))
            for begin, end in spans
        ]
        trained = _targets(places, spans)
        if not trained.any():
            return None
        said = (self._tokens.sub("", divided[begin:end]) for begin, end in spans)
        size = sum(utf8_bytes(one.replace(CUT, "")) for one in said)
        tokens = np.array(ids, dtype=self.tokenizer.dtype)
        return EncodedChat(tokens, trained, size, is_shortened=end < replies[-1])


def _targets(places: Spans, spans: Spans) -> NDArray[np.uint8]:
    """1 for each token that has a character of the assistant, as in transformers; else 0."""
    begins, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
    trained = np.zeros(len(begins), dtype=np.uint8)
    for begin, end in spans:
        trained[(begins < end) & (ends > begin)] = 1
    trained[:1] = 0  # nothing predicts the first token
    return trained
