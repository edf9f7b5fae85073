"""Conversations as tokens: rendered by the tokenizer's chat template, with their targets marked.

transformers renders and encodes, and is imported only for that. A special token that a message
spells out is encoded as text (`sanitize_control_tokens`), so that no message can end a turn.
"""

from __future__ import annotations

import re
from datetime import date
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
        self._theirs = tokenizer.as_transformers()
        self._theirs.chat_control_tokens = self._tokens_between_messages()

    def template_for(self, conversation: Conversation) -> str:
        """The template: with tools, the one that is named tool_use, as transformers chooses it."""
        named = "tool_use" if "tools" in conversation.extras else "default"
        return self.templates.get(named, self.templates["default"])

    def _apply(self, conversation: Conversation, **options: Any) -> Any:
        """What transformers' apply_chat_template returns. Raises ChatError if it refuses."""
        from transformers.utils import chat_template_utils

        template = self.template_for(conversation)
        try:
            if self.today is not None:  # with the clock, a text would have other tokens tomorrow
                compiled = chat_template_utils._compile_jinja_template(template)
                compiled.globals["strftime_now"] = self.today.strftime
            return self._theirs.apply_chat_template(
                list(conversation.messages),
                chat_template=template,
                **conversation.extras,
                **options,
            )
        except Exception as error:  # templates and jinja raise errors of any type
            raise ChatError(f"the chat template refuses it: {reason_of(error):.200}") from error

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation. Raises ChatError if the template refuses it."""
        text: str = self._apply(conversation, tokenize=False)
        return text

    def stops(self, conversation: Conversation = EMPTY) -> frozenset[int]:
        """The tokens that end a reply after a conversation and a question.

        They are the end-of-text token and the first mark that the template writes after a reply.
        """
        turns = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": PROBE}]
        try:
            after = self.render(conversation.and_then(turns)).rpartition(PROBE)[2]
        except ChatError:  # a template that asks for more than that
            after = ""
        ids = self._theirs.encode(after, add_special_tokens=False)
        tokens = {*self.tokenizer.marks, *self._theirs.chat_control_tokens}
        marks = {self.tokenizer.added_tokens[text] for text in tokens}
        written = [number for number in ids if number in marks]
        assert self.tokenizer.end_of_text is not None
        return frozenset({self.tokenizer.end_of_text, *written[:1]})

    def _tokens_between_messages(self) -> list[str]:
        """The tokens that no message may write, besides special ones.

        Some models' marks of roles are added tokens that are not special. Others, such as <think>,
        are for a reply to write.
        """
        turns = [{"role": role, "content": PROBE} for role in ("user", ASSISTANT, "user")]
        try:
            # Before the first message is perhaps a system prompt, which may explain <think>.
            between = self.render(EMPTY.and_then(turns)).split(PROBE)[1:]
        except ChatError:  # a template that asks for more than that: all that it spells out
            between = [*self.templates.values()]
        # Gemma has tokens for line ends, which are no marks.
        added = [text for text in self.tokenizer.added_tokens if text.strip()]
        return [text for text in added if any(text in part for part in between)]

    def _ids(self, conversation: Conversation, reply: bool = False) -> list[int]:
        """The tokens of a conversation; with `reply` up to where the assistant begins to write."""
        ids: list[int] = self._apply(
            conversation,
            add_generation_prompt=reply,
            sanitize_control_tokens=True,
            return_dict=False,
        )
        return ids

    def encode_prompt(self, conversation: Conversation) -> NDArray:
        """The tokens (T,) after which the assistant writes its reply. Raises ChatError."""
        return np.array(self._ids(conversation, reply=True), dtype=self.tokenizer.dtype)

    def encode(self, conversation: Conversation, longest: int) -> EncodedChat | None:
        """The tokens of a conversation up to its last reply, at most so many.

        A longer one loses its last turns, up to an earlier reply. None if its first reply does not
        fit, if its replies have no tokens, or if a message spells out a special token where the
        template marks the assistant's text. Raises ChatError.
        """
        replies = conversation.ends_of_replies
        if not replies:
            what = "reply to train on" if conversation.messages else "messages"
            raise ChatError(f"it has no {what}")
        for end in reversed(replies):
            part = conversation.up_to(end)
            ids = np.array(self._ids(part), dtype=self.tokenizer.dtype)
            if len(ids) <= longest:
                trained = self._targets(part, ids.tolist())
                trained[:1] = 0  # nothing predicts the first token
                text = self.tokenizer.decode(ids[trained == 1], skip_special_tokens=True)
                chat = EncodedChat(ids, trained, utf8_bytes(text), end < replies[-1])
                return chat if chat.targets else None
        return None

    def _targets(self, conversation: Conversation, ids: list[int]) -> NDArray[np.uint8]:
        """For each token 1 if it is the assistant's, else 0. Raises ChatError."""
        if not GENERATION.search(self.template_for(conversation)):
            return self._added_by_replies(conversation, ids)
        found = self._apply(conversation, return_dict=True, return_assistant_tokens_mask=True)
        if found["input_ids"] != ids:  # transformers does not sanitize and mark at once
            return np.zeros(len(ids), dtype=np.uint8)
        return np.array(found["assistant_masks"], dtype=np.uint8)

    def _added_by_replies(self, conversation: Conversation, ids: list[int]) -> NDArray[np.uint8]:
        """Which tokens a reply adds to those with which the template asks for it.

        A token that has characters of both is the reply's. Raises ChatError if the template writes
        a reply differently when it asks for it, or when other messages follow.
        """
        trained = np.zeros(len(ids), dtype=np.uint8)
        for end in conversation.ends_of_replies:
            # transformers renders no empty conversation.
            before = self._ids(conversation.up_to(end - 1), reply=True) if end > 1 else []
            is_last = end == len(conversation.messages)
            after = ids if is_last else self._ids(conversation.up_to(end))
            begin, stop = _in_common(before, after), _in_common(after, ids)
            if begin < len(before) - 1:
                prompt = self.tokenizer.decode(before[begin:])
                raise ChatError(
                    f"the chat template begins a reply with {prompt!r:.80} when it asks for one, "
                    f"and writes turn {end} without that, {UNMARKED}"
                )
            if stop < len(after) - 1:
                raise ChatError(
                    f"the chat template writes turn {end} differently when others follow, "
                    f"{UNMARKED}"
                )
            trained[begin : len(after)] = 1
        return trained


def _in_common(one: list[int], other: list[int]) -> int:
    """With how many equal tokens both begin."""
    same = (number for number, pair in enumerate(zip(one, other, strict=False)) if len({*pair}) > 1)
    return next(same, min(len(one), len(other)))
