"""Conversations as tokens: rendered by the tokenizer's chat template, with their targets marked.

transformers renders the template, in a sandbox, and is imported only for that. A special token that
a message spells out is encoded as text, so that no message can end a turn: the tokens are those of
`apply_chat_template(sanitize_control_tokens=True)`, which cannot say which of them are targets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from functools import cached_property
from importlib.util import find_spec
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
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The template's mark for text that the assistant writes."""
PROBE = "the reply"
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

    @property
    def targets(self) -> int:
        """The number of targets."""
        return int(self.trained.sum())


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

    def template_for(self, conversation: Conversation) -> str:
        """The template: with tools, the one that is named tool_use, as transformers chooses it."""
        named = "tool_use" if "tools" in conversation.extras else "default"
        return self.templates.get(named, self.templates["default"])

    def stops(self, conversation: Conversation = EMPTY) -> frozenset[int]:
        """The tokens that end a reply after a conversation and a question.

        They are the end-of-text token and the first mark that the template writes after a reply.
        """
        turns = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": PROBE}]
        after = self._after_probes(conversation.and_then(turns))[-1:]
        ids, _ = self.tokenizer.encode_parts((text, False, 0) for text in after)
        marks = {self.tokenizer.added_tokens[text] for text in self._unwritable}
        written = [number for number in ids if number in marks]
        end_of_text = self.tokenizer.marks[self.tokenizer.special_tokens["eos_token"]]
        return frozenset({end_of_text, *written[:1]})

    def _after_probes(self, conversation: Conversation) -> list[str]:
        """What the template writes after each probe in a conversation.

        Nothing if it takes no such conversation, or leaves out a content that is a text.
        """
        try:
            return self.render(conversation).split(PROBE)[1:]
        except ChatError:  # a template that asks for more than that
            return []

    @cached_property
    def _unwritable(self) -> set[str]:
        """The tokens that no message may write: special ones, and those between messages.

        Some models' marks of roles are added tokens that are not special. Others, such as <think>,
        are for a reply to write.
        """
        marks, added = set(self.tokenizer.marks), self.tokenizer.added_tokens
        turns = [{"role": role, "content": PROBE} for role in ("user", ASSISTANT, "user")]
        # Before the first message is perhaps a system prompt, which may explain <think>.
        between = self._after_probes(EMPTY.and_then(turns))
        if not between:  # all that the templates spell out
            templates = "".join(self.templates.values())
            return marks.union(text for text in added if text.strip() and text in templates)
        found, _ = self.tokenizer.encode_parts([(part, False, 0) for part in between])
        # Gemma has tokens for line ends, which are no marks.
        return marks.union(text for text, i in added.items() if i in found and text.strip())

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """What no message may write, and the same between transformers' markers, or one of them."""
        from transformers.utils import chat_template_utils

        patterns = chat_template_utils._get_control_token_patterns(tuple(sorted(self._unwritable)))
        return patterns[0], patterns[1]

    def _marked(self, conversation: Conversation) -> Conversation:
        """A conversation with transformers' markers around what no message may write."""
        from transformers.utils.chat_template_utils import mark_control_tokens

        messages = mark_control_tokens(list(conversation.messages), self._patterns[0])
        extras = mark_control_tokens(dict(conversation.extras), self._patterns[0])
        return Conversation(messages, extras)

    def render(self, conversation: Conversation, reply: bool = False) -> str:
        """The text of a conversation; with `reply` it ends where the assistant begins to write.

        Raises ChatError if the template refuses it.
        """
        return self._render(conversation, reply, track=False)[0]

    def _render(self, conversation: Conversation, reply: bool, track: bool) -> tuple[str, Spans]:
        """The text, and with `track` where it is between marks of `{% generation %}`."""
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template  # its annotation is wrong
        template = self.template_for(conversation)
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

    def _unmarked(self, conversation: Conversation, text: str) -> Spans:
        """Where the text of a conversation is the assistant's, if its template marks nothing.

        It is what the template adds after the start of a reply when the message is there. Raises
        ChatError if it cannot be located so.
        """
        spans = []
        for end in conversation.ends_of_replies:
            before = self.render(conversation.up_to(end - 1), reply=True)
            after = self.render(conversation.up_to(end))
            if not after.startswith(before):
                same = [a == b for a, b in zip(before, after, strict=False)]
                prompt = before[[*same, False].index(False) :]
                raise ChatError(
                    f"the chat template begins a reply with {prompt!r:.80} when it asks for one, "
                    f"and writes turn {end} without that, {UNMARKED}"
                )
            if not text.startswith(after):
                raise ChatError(
                    f"the chat template writes turn {end} differently when others follow, "
                    f"{UNMARKED}"
                )
            spans.append((len(before), len(after)))
        return spans

    def encode_prompt(self, conversation: Conversation) -> NDArray:
        """The tokens (T,) after which the assistant writes its reply. Raises ChatError."""
        text = self.render(self._marked(conversation), reply=True)
        ids, _ = self.tokenizer.encode_parts(self._parts(text))
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
        conversation = self._marked(conversation)
        has_marks = GENERATION.search(self.template_for(conversation)) is not None
        for end in reversed(replies):
            part = conversation.up_to(end)
            text, spans = self._render(part, reply=False, track=has_marks)
            ids, places = self.tokenizer.encode_parts(self._parts(text))
            if len(ids) <= longest:
                if not has_marks:
                    spans = self._unmarked(part, text)
                elif not spans:
                    raise ChatError("the chat template marks no assistant text by {% generation %}")
                trained = self._targets(places, spans)
                size = sum(self._bytes_in(text[begin:end]) for begin, end in spans)
                tokens = np.array(ids, dtype=self.tokenizer.dtype)
                chat = EncodedChat(tokens, trained, size, is_shortened=end < replies[-1])
                return chat if chat.targets else None
        return None

    def _parts(self, text: str) -> Iterator[tuple[str, bool, int]]:
        """A text, cut at its markers: a token between two of them is a part of its own.

        Each part with whether it is such a token, and the index of its first character. A marker
        that a template has left without its other one is dropped.
        """
        begin = 0
        for match in self._patterns[1].finditer(text):
            yield text[begin : match.start()], False, begin
            if match[1]:
                yield match[1], True, match.start(1)
            begin = match.end()
        yield text[begin:], False, begin

    def _targets(self, places: Spans, spans: Spans) -> NDArray[np.uint8]:
        """1 for each token that has a character of the assistant, as in transformers; else 0."""
        begins, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
        trained = np.zeros(len(begins), dtype=np.uint8)
        for begin, end in spans:
            if begin < end:
                trained[(begins < end) & (ends > begin)] = 1
        trained[:1] = 0  # nothing predicts the first token
        return trained

    def _bytes_in(self, text: str) -> int:
        """Bytes of a rendered text, without the marks that the template has written."""
        parts = self._parts(text)
        written = (
            part if is_token else self._patterns[0].sub("", part) for part, is_token, _ in parts
        )
        return sum(map(utf8_bytes, written))
