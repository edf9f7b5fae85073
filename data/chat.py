"""Conversations as tokens: rendered by the tokenizer's chat template, with what is a target.

transformers renders the template, in a sandbox; it is imported only then. A special token that a
message spells out is encoded as text, so that nobody ends a turn by writing its mark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.columns import Message
from data.errors import DataError
from data.pieces import utf8_bytes
from data.subwords import SubwordTokenizer
from data.tokenizer import Tokenizer

ASSISTANT = "assistant"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Marks in a template what the assistant writes."""
PROBE = "the reply"
TRAINING_DATE = date(2024, 7, 26)
"""What a template writes as today's date in training; Llama's writes this one without a clock."""
BEGIN_TEXT, END_TEXT = "\ue000", "\ue001"
"""Around a special token that a message spells out. Private characters: no text has them."""


class ChatError(DataError):
    """A conversation that the template or the loss cannot take: a sentence, without its row."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    """With `BEGIN_TEXT` and `END_TEXT`."""
    spans: list[tuple[int, int]]
    """Where the assistant's text begins and ends, in characters."""
    text_bytes: int = 0
    """Of the assistant's messages, in UTF-8."""


class EncodedChat(NamedTuple):
    """A conversation as tokens."""

    ids: NDArray
    trained: NDArray[np.uint8]
    """1 for each token that is a target: the assistant's, but for the very first; else 0."""
    text_bytes: int
    """Of the assistant's messages, in UTF-8; the marks of the template have none."""
    is_shortened: bool = False

    @property
    def targets(self) -> int:
        """How many targets it has."""
        return int(self.trained.sum())


def no_template(where: str) -> DataError:
    """The error for a tokenizer without a chat template."""
    return DataError(
        f"{where} has no chat template, which says how a conversation becomes text. Name a model "
        "or a tokenizer that has one: often its name ends in -Instruct or -it."
    )


class ChatTemplate:
    """Renders and encodes conversations."""

    def __init__(self, tokenizer: Tokenizer, where: str, today: date | None = None) -> None:
        """`where` names the tokenizer, `today` is the date that the template may write.

        Raises DataError if the tokenizer has no chat template.
        """
        template = tokenizer.chat_template if isinstance(tokenizer, SubwordTokenizer) else None
        if template is None:
            raise no_template(where)
        if find_spec("transformers") is None:
            raise DataError(
                "conversations need transformers, which renders chat templates. "
                "Install it with: pip install -r requirements-models.txt"
            )
        assert isinstance(tokenizer, SubwordTokenizer)
        self.tokenizer = tokenizer
        self.template = template
        self.today = today
        marks = sorted(tokenizer.marks, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks)))

    def stops(self, messages: Sequence[Message] = ()) -> frozenset[int]:
        """The tokens that end a reply after `messages` and a question.

        They are the end-of-text token and the first mark that the template writes after a reply.
        """
        marks = self.tokenizer.marks
        turns = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": PROBE}]
        try:
            after = self.render([*messages, *turns]).rpartition(PROBE)[2]
        except ChatError:  # a template that asks for more than that
            after = ""
        written = [token for token in self._ids(after) if token in marks.values()]
        return frozenset({marks[self.tokenizer.special_tokens["eos_token"]], *written[:1]})

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode_marked([(text, False)])[0][0]

    @property
    def no_tokens(self) -> NDArray:
        """An empty array of token ids."""
        return np.zeros(0, dtype=self.tokenizer.dtype)

    def render(self, messages: Sequence[Message], reply: bool = False) -> str:
        """The text of messages; with `reply` it ends where the assistant begins to write.

        Raises ChatError if the template refuses them.
        """
        return self._render(messages, reply, track=False).text

    def _render(self, messages: Sequence[Message], reply: bool, track: bool) -> Rendered:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template  # its annotation is not what it is
        try:
            if self.today is not None:  # or a text would have other tokens tomorrow
                compiled = chat_template_utils._compile_jinja_template(self.template)
                compiled.globals["strftime_now"] = self.today.strftime
            texts, spans = render(
                [self._marked(list(messages))],
                chat_template=self.template,
                add_generation_prompt=reply,
                return_assistant_tokens_mask=track,
                **self.tokenizer.special_tokens,
            )
        except Exception as error:  # whatever a template raises, and jinja
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ChatError(f"the chat template refuses it: {reason:.200}") from error
        return Rendered(texts[0], [tuple(span) for span in spans[0]] if track else [])

    def _marked(self, value: Any) -> Any:
        """A message whose special tokens are marked as text."""
        if isinstance(value, str):
            bare = value.replace(BEGIN_TEXT, "").replace(END_TEXT, "")
            return self._marks.sub(rf"{BEGIN_TEXT}\g<0>{END_TEXT}", bare)
        if isinstance(value, dict):
            return {self._marked(key): self._marked(entry) for key, entry in value.items()}
        return [self._marked(entry) for entry in value] if isinstance(value, list) else value

    def with_spans(self, messages: Sequence[Message]) -> Rendered:
        """The text of messages, and where it is the assistant's.

        The template's own marks say it, `{% generation %}`. Without them, the assistant's text is
        what the template adds to the beginning of a reply when the message is there. Raises
        ChatError where neither tells.
        """
        if GENERATION.search(self.template):
            rendered = self._render(messages, reply=False, track=True)
            return rendered._replace(spans=[span for span in rendered.spans if span[0] < span[1]])
        whole = self.render(messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self.render(messages[:number], reply=True)
            after = self.render(messages[: number + 1])
            if not after.startswith(before) or not whole.startswith(after):
                raise ChatError(
                    f"the chat template writes turn {number + 1} differently when others follow, "
                    "so the assistant's text cannot be told. Mark it in the template with "
                    "{% generation %} and {% endgeneration %}"
                )
            spans.append((len(before), len(after)))
        return Rendered(whole, spans)

    def encode_prompt(self, messages: Sequence[Message]) -> NDArray:
        """The tokens (T,) after which the assistant writes its reply. Raises ChatError."""
        rendered = self._render(messages, reply=True, track=False)
        return self._encode([rendered])[0].ids

    def encode(
        self, conversations: Sequence[Sequence[Message]], longest: int
    ) -> list[EncodedChat | ChatError | None]:
        """Encode conversations, on all cores, each with at most so many tokens.

        A longer one loses its last turns, up to an earlier reply. None stands for one whose first
        reply does not fit or whose replies have no tokens, an error for one that has an error.
        """
        rendered = list(map(self._try_render, conversations))
        encoded = iter(self._encode([one for one in rendered if isinstance(one, Rendered)]))
        found: list[EncodedChat | ChatError | None] = []
        for messages, one in zip(conversations, rendered, strict=True):
            chosen: EncodedChat | ChatError | None = one if isinstance(one, ChatError) else None
            if isinstance(one, Rendered):
                chosen = next(encoded)
                if len(chosen.ids) > longest:
                    chosen = self._shorter(messages, longest)
            has_no_target = isinstance(chosen, EncodedChat) and not chosen.targets
            found.append(None if has_no_target else chosen)
        return found

    def _shorter(self, messages: Sequence[Message], longest: int) -> EncodedChat | ChatError | None:
        """The conversation up to its last reply that fits."""
        best: EncodedChat | None = None
        replies = _ends_of_replies(messages)
        least, most = 0, len(replies) - 1  # whole, it is too long
        while least < most:
            middle = (least + most) // 2
            rendered = self._try_render(messages[: replies[middle]])
            if isinstance(rendered, ChatError):
                return rendered
            encoded = self._encode([rendered])[0]
            if len(encoded.ids) <= longest:
                best, least = encoded._replace(is_shortened=True), middle + 1
            else:
                most = middle
        return best

    def _try_render(self, messages: Sequence[Message]) -> Rendered | ChatError:
        replies = _ends_of_replies(messages)
        if not replies:
            return ChatError("it has no messages" if not messages else "it has no reply to learn")
        try:
            rendered = self.with_spans(messages[: replies[-1]])
        except ChatError as error:
            return error
        if not rendered.spans:
            return ChatError("the chat template marks no text of its replies as the assistant's")
        used = [one for one in messages[: replies[-1]] if one["role"] == ASSISTANT]
        return rendered._replace(text_bytes=sum(utf8_bytes(one["content"]) for one in used))

    def _encode(self, conversations: Sequence[Rendered]) -> list[EncodedChat]:
        parts = [list(_parts(one.text)) for one in conversations]
        texts = [(text, as_text) for found in parts for text, as_text, _ in found]
        encodings = iter(self.tokenizer.encode_marked(texts))
        found = []
        for one, of in zip(conversations, parts, strict=True):
            ids: list[int] = []
            begins: list[int] = []  # of each token, in characters of the rendered text
            for _, _, offset in of:
                part_ids, part_begins = next(encodings)
                ids += part_ids
                begins += [offset + begin for begin in part_begins]
            found.append(self._with_mask(one, ids, begins))
        return found

    def _with_mask(self, rendered: Rendered, ids: list[int], begins: list[int]) -> EncodedChat:
        """A token is the assistant's if it begins in the assistant's text."""
        trained = np.zeros(len(ids), dtype=np.uint8)
        for begin, end in rendered.spans:
            trained[np.searchsorted(begins, begin) : np.searchsorted(begins, end)] = 1
        trained[:1] = 0  # nothing predicts the first token
        ids_of_type = np.array(ids, dtype=self.tokenizer.dtype)
        return EncodedChat(ids_of_type, trained, rendered.text_bytes)


def _ends_of_replies(messages: Sequence[Message]) -> list[int]:
    """How many messages there are up to each reply, itself included."""
    return [i + 1 for i, message in enumerate(messages) if message["role"] == ASSISTANT]


def _parts(text: str) -> list[tuple[str, bool, int]]:
    """A rendered text cut at its marks: each part, whether it is only text, and where it begins."""
    parts, begin, as_text = [], 0, False
    for match in re.finditer(rf"[{BEGIN_TEXT}{END_TEXT}]|\Z", text):
        if match.start() > begin:
            parts.append((text[begin : match.start()], as_text, begin))
        begin, as_text = match.end(), match.group() == BEGIN_TEXT
    return parts
