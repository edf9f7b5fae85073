"""Conversations as tokens: rendered by the tokenizer's chat template, with their targets marked.

transformers renders the template, in a sandbox, and is imported only for that. A special token that
a message spells out is encoded as text, so that no message can end a turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError
from data.messages import ASSISTANT, EMPTY, ChatError, Conversation, Fences, Part, any_of, fenced
from data.pieces import utf8_bytes
from data.seams import Tokens
from data.subwords import SubwordTokenizer
from data.tokenizer import Tokenizer

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The template's mark for text that the assistant writes."""
PROBE = "the reply"
TRAINING_DATE = date(2024, 7, 26)
"""Today's date for templates in training. Llama's template uses it if it has no clock."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    """The text, with fences."""
    spans: list[tuple[int, int]]
    """Start and end of each assistant text, in characters."""
    fences: Fences | None = None
    """The fences around special tokens that messages spell out; None if there are none."""


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


def no_template(where: str) -> DataError:
    """The error for a tokenizer without a chat template."""
    return DataError(
        f"{where} has no chat template, which formats conversations as text. Name a model or a "
        "tokenizer that has one; their names often end in -Instruct or -it."
    )


class ChatTemplate:
    """Renders and encodes conversations."""

    def __init__(self, tokenizer: Tokenizer, where: str, today: date | None = None) -> None:
        """`where` names the tokenizer, `today` is the date that the template may write.

        Raises DataError if the tokenizer has no chat template.
        """
        templates = tokenizer.chat_templates if isinstance(tokenizer, SubwordTokenizer) else {}
        if "default" not in templates:
            raise no_template(where)
        if find_spec("transformers") is None:
            raise DataError(
                "conversations need transformers, which renders chat templates. "
                "Install it with: pip install -r requirements-models.txt"
            )
        assert isinstance(tokenizer, SubwordTokenizer)
        self.tokenizer = tokenizer
        self.templates = templates
        self.today = today
        self._ends: frozenset[str] | None = None

    def template_for(self, conversation: Conversation) -> str:
        """The template: with tools, the one that is named tool_use, as transformers chooses it."""
        named = "tool_use" if "tools" in conversation.extras else "default"
        return self.templates.get(named, self.templates["default"])

    def unwritten(self, conversation: Conversation) -> set[str]:
        """Fields of a conversation that the template never mentions, and so loses."""
        return conversation.fields_but(_words(self.template_for(conversation)))

    def stops(self, conversation: Conversation = EMPTY) -> frozenset[int]:
        """The tokens that end a reply after a conversation and a question.

        They are the end-of-text token and the first mark that the template writes after a reply.
        """
        marks, added = self.tokenizer.marks, self.tokenizer.added_tokens
        turns = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": PROBE}]
        try:
            after = self.render(conversation.and_then(turns)).rpartition(PROBE)[2]
        except ChatError:  # a template that asks for more than that
            after = ""
        ids = self.tokenizer.encode_marked([after])[0].ids
        others = {added[text] for text in self._unwritable}
        written = [i for i in ids if i in marks.values()] or [i for i in ids if i in others]
        return frozenset({marks[self.tokenizer.special_tokens["eos_token"]], *written[:1]})

    @cached_property
    def _unwritable(self) -> set[str]:
        """The tokens that no message may write: special ones, and those between messages.

        Some models' marks of roles are added tokens that are not special.
        """
        turns = [{"role": role, "content": PROBE} for role in ("user", ASSISTANT, "user")]
        try:
            # Before the first message is perhaps a system prompt, which may explain <think>.
            between = self.render(EMPTY.and_then(turns)).split(PROBE)[1:]
        except ChatError:  # a template that asks for more than that
            return self._spelled_out.union(self.tokenizer.marks)
        found = {i for part in self.tokenizer.encode_marked(between) for i in part.ids}
        words = self.tokenizer.added_tokens.items()
        return {text for text, i in words if i in found and text.strip()}.union(
            self.tokenizer.marks
        )

    @cached_property
    def _spelled_out(self) -> set[str]:
        """The added tokens that the templates spell out, special or not."""
        texts = self.templates.values()
        # Gemma has tokens for line ends, which are no marks.
        words = (text for text in self.tokenizer.added_tokens if text.strip())
        return {word for word in words if any(word in text for text in texts)}

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return any_of(self._unwritable | self._spelled_out)

    @cached_property
    def _no_text(self) -> re.Pattern[str]:
        return any_of(self._unwritable)

    @property
    def no_tokens(self) -> NDArray:
        """An empty array of token ids."""
        return np.zeros(0, dtype=self.tokenizer.dtype)

    def render(self, conversation: Conversation, reply: bool = False) -> str:
        """The text of a conversation; with `reply` it ends where the assistant begins to write.

        Raises ChatError if the template refuses it.
        """
        return self._render(conversation, reply, track=False).text

    def _render(self, conversation: Conversation, reply: bool, track: bool) -> Rendered:
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
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ChatError(f"the chat template refuses it: {reason:.200}") from error
        return Rendered(texts[0], [tuple(span) for span in spans[0]] if track else [])

    def _fenced(
        self, conversation: Conversation, reply: bool
    ) -> tuple[Conversation, Fences | None]:
        if self._ends is None:
            ends = self.stops()
            added = self.tokenizer.added_tokens.items()
            self._ends = frozenset(text for text, i in added if i in ends)
        template, render = self.template_for(conversation), partial(self.render, reply=reply)
        writable = self._spelled_out - self._unwritable
        return fenced(conversation, self._marks, self._ends, writable, template, render)

    def with_spans(self, conversation: Conversation) -> Rendered:
        """The text of a conversation, and where it is the assistant's.

        The template marks the assistant's text with `{% generation %}`. Without marks, it is what
        the template adds after the start of a reply when the message is there. Raises ChatError if
        neither works.
        """
        conversation, fences = self._fenced(conversation, reply=False)
        if GENERATION.search(self.template_for(conversation)):
            rendered = self._render(conversation, reply=False, track=True)
            if not rendered.spans:
                raise ChatError("the chat template marks no assistant text by {% generation %}")
            return Rendered(
                rendered.text, [one for one in rendered.spans if one[0] < one[1]], fences
            )
        whole = self.render(conversation)
        spans = []
        for end in conversation.ends_of_replies:
            before = self.render(conversation.up_to(end - 1), reply=True)
            after = self.render(conversation.up_to(end))
            if not after.startswith(before) or not whole.startswith(after):
                raise ChatError(
                    f"the chat template writes turn {end} differently when others follow, "
                    "so the assistant's text cannot be located. Mark it in the template with "
                    "{% generation %} and {% endgeneration %}"
                )
            spans.append((len(before), len(after)))
        return Rendered(whole, spans, fences)

    def encode_prompt(self, conversation: Conversation) -> NDArray:
        """The tokens (T,) after which the assistant writes its reply. Raises ChatError."""
        found, fences = self._fenced(conversation, reply=True)
        return self._encode([Rendered(self.render(found, reply=True), [], fences)])[0].ids

    def encode(
        self, conversations: Sequence[Conversation], longest: int
    ) -> list[EncodedChat | ChatError | None]:
        """Encode conversations, on all cores, each with at most so many tokens.

        A longer one loses its last turns, up to an earlier reply. None stands for one whose first
        reply does not fit or whose replies have no tokens, an error for one that has an error.
        """
        rendered = list(map(self._try_render, conversations))
        encoded = iter(self._encode([one for one in rendered if isinstance(one, Rendered)]))
        found: list[EncodedChat | ChatError | None] = []
        for conversation, one in zip(conversations, rendered, strict=True):
            chosen: EncodedChat | ChatError | None = one if isinstance(one, ChatError) else None
            if isinstance(one, Rendered):
                chosen = next(encoded)
                if len(chosen.ids) > longest:
                    chosen = self._shorter(conversation, longest)
            has_no_target = isinstance(chosen, EncodedChat) and not chosen.targets
            found.append(None if has_no_target else chosen)
        return found

    def _shorter(self, conversation: Conversation, longest: int) -> EncodedChat | ChatError | None:
        """The conversation up to its last reply that fits."""
        best: EncodedChat | None = None
        replies = conversation.ends_of_replies
        least, most = 0, len(replies) - 1  # whole, it is too long
        while least < most:
            middle = (least + most) // 2
            rendered = self._try_render(conversation.up_to(replies[middle]))
            if isinstance(rendered, ChatError):
                return rendered
            encoded = self._encode([rendered])[0]
            if len(encoded.ids) <= longest:
                best, least = encoded._replace(is_shortened=True), middle + 1
            else:
                most = middle
        return best

    def _try_render(self, conversation: Conversation) -> Rendered | ChatError:
        replies = conversation.ends_of_replies
        if not replies:
            nothing = not conversation.messages
            return ChatError("it has no messages" if nothing else "it has no reply to train on")
        try:
            rendered = self.with_spans(conversation.up_to(replies[-1]))
        except ChatError as error:
            return error
        return rendered

    def _encode(self, conversations: Sequence[Rendered]) -> list[EncodedChat]:
        plain = [one.text for one in conversations if one.fences is None]
        encoded = iter(self.tokenizer.encode_marked(plain))
        return [
            self._with_mask(one, next(encoded) if one.fences is None else self._in_parts(one))
            for one in conversations
        ]

    def _in_parts(self, rendered: Rendered) -> Tokens:
        """The tokens of a conversation that spells out special tokens."""
        found, before = Tokens([], []), ""
        for part in self._parts(rendered, rendered.text):
            one = self.tokenizer.encode_after(before, part.text, part.as_text)
            found.ids.extend(one.ids)
            found.offsets.extend(
                (part.begin + begin, part.begin + end) for begin, end in one.offsets
            )
            before = part.text
        return found

    def _parts(self, rendered: Rendered, text: str) -> list[Part]:
        if rendered.fences is None:
            return [Part(text, False, 0)]
        return list(rendered.fences.parts(text, self._marks))

    def _with_mask(self, rendered: Rendered, tokens: Tokens) -> EncodedChat:
        """A token is a target if a character of it is the assistant's, as in transformers."""
        begins, ends = np.array(tokens.offsets, dtype=np.int64).reshape(-1, 2).T
        trained = np.zeros(len(begins), dtype=np.uint8)
        text_bytes = 0
        for begin, end in rendered.spans:
            trained[(begins < end) & (ends > begin)] = 1
            for part in self._parts(rendered, rendered.text[begin:end]):
                text = part.text if part.as_text else self._no_text.sub("", part.text)
                text_bytes += utf8_bytes(text)
        trained[:1] = 0  # nothing predicts the first token
        ids = np.array(tokens.ids, dtype=self.tokenizer.dtype)
        return EncodedChat(ids, trained, text_bytes)


@lru_cache
def _words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", template))
