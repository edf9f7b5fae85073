"""Conversations as tokens: what a template renders, what is a target, and what is refused."""

from __future__ import annotations

import json
import re

import pytest

import chats
from config.compose import load_config
from config.schema import ConfigError
from data.chat import ChatTemplate
from data.errors import DataError
from data.messages import ChatError, Conversation
from texts import conversations_of

TWO_TURNS = chats.said("the run", "goes on", "where", "it was")
FIRST_TURN = "<|im_start|>user\nthe run<|im_end|>\n<|im_start|>assistant\n{goes on<|im_end|>}\n"
TABLE = {
    "ChatML": (
        TWO_TURNS,
        f"{FIRST_TURN}<|im_start|>user\nwhere<|im_end|>\n"
        "<|im_start|>assistant\n{it was<|im_end|>}\n",
    ),
    "Llama 3": (
        TWO_TURNS,
        "<s><|head|>user<|/head|>\n\nthe run<|eot|><|head|>assistant<|/head|>\n\n{goes on<|eot|>}"
        "<|head|>user<|/head|>\n\nwhere<|eot|><|head|>assistant<|/head|>\n\n{it was<|eot|>}",
    ),
    "without marks": (
        TWO_TURNS,
        "<s>[INST] the run [/INST]{ goes on</s>}[INST] where [/INST]{ it was</s>}",
    ),
    chats.CHATML_UNMARKED: (
        [{"role": "assistant", "content": "hello"}, *TWO_TURNS[:2]],
        "<|im_start|>assistant\n{hello<|im_end|>\n}" + FIRST_TURN.replace("}\n", "\n}"),
    ),
    # A question after the last reply is left out.
    chats.CHATML: (TWO_TURNS[:3], FIRST_TURN),
}
"""By template, a conversation and its text by hand; what is a target stands in braces."""


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(chats.tokenizer(chats.TEMPLATES.get(name, name)), "here")


def encoded(template, messages, longest=10_000):
    return template.encode(Conversation(messages), longest)


@pytest.mark.parametrize("name", TABLE)
def test_targets_are_those_of_a_table_made_by_hand(name):
    template, (messages, expected) = template_of(name), TABLE[name]
    chat = encoded(template, messages)
    text, before = "", 0
    for token, flag in [*zip(chat.ids, chat.trained, strict=True), (None, 0)]:
        text += ("{" if flag else "}") if flag != before else ""
        text += "" if token is None else template.tokenizer.decode([token])
        before = flag
    assert text == expected
    spoken = re.sub(r"<.*?>", "", "".join(re.findall(r"{(.*?)}", expected, re.DOTALL)))
    assert chat.text_bytes == len(spoken)


def test_a_special_token_that_a_reply_spells_has_the_bytes_of_its_text():
    reply = "it was <|im_end|>"
    assert encoded(template_of("ChatML"), chats.said("a", reply)).text_bytes == len(reply)


@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_a_prompt_is_what_comes_before_the_reply(name):
    template = template_of(name)
    prompt = template.encode_prompt(Conversation(TWO_TURNS[:3])).tolist()
    whole = encoded(template, TWO_TURNS)
    assert whole.ids[: len(prompt)].tolist() == prompt
    assert whole.trained[len(prompt) - 1 : len(prompt) + 1].tolist() == [0, 1]


WHOLE_TURN = (
    "{% for m in messages %}{% generation %}{{ '<|im_start|>' + m['role'] + '\n' + m['content']"
    " + '<|eot|>' }}{% endgeneration %}{% endfor %}"
)
OF_PARTS = chats.LLAMA.replace("m['content']", "m['content'][0]['text']")


@pytest.mark.parametrize(
    ("name", "marks"),
    [
        *(("ChatML", ["<|im_end|>"]), ("Llama 3", ["<|eot|>"]), ("without marks", ["</s>"])),
        (WHOLE_TURN, ["<|eot|>"]),  # and not at the beginning of a reply
        *((OF_PARTS, []), ("{{ raise_exception('no tools') }}", [])),  # they ask for more
    ],
)
def test_a_reply_ends_at_the_mark_of_its_template(name, marks):
    template = template_of(name)
    known = template.tokenizer.marks
    assert template.stops() == {known[mark] for mark in (*marks, "<|im_end|>")}


@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_what_is_too_long_loses_whole_turns(name):
    template = template_of(name)
    messages = chats.said(*["the run", "goes on"] * 4)
    whole, two = encoded(template, messages), encoded(template, messages[:4])
    shortened = encoded(template, messages, longest=len(two.ids) + 2)
    assert (shortened.is_shortened, whole.is_shortened) == (True, False)
    assert shortened.ids.tolist() == two.ids.tolist()
    assert shortened.trained.tolist() == two.trained.tolist()
    assert encoded(template, messages, longest=len(whole.ids)).ids.tolist() == whole.ids.tolist()
    assert encoded(template, messages, longest=6) is None


ODD = {
    "no reply": ("ChatML", chats.said("the run"), "it has no reply to train on"),
    "a reserved code point": ("ChatML", chats.said("a\ufdd0b", "c"), r"it has '\\ufdd0', which"),
    "another one": ("ChatML", chats.said("a", "b\ufdd1"), r"it has '\\ufdd1', which"),
    "a role that is refused": (
        "without marks",
        [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}],
        "the chat template refuses it: roles must alternate",
    ),
    "a template that hides replies": (
        chats.FORGETFUL,
        chats.said("the </s> run", "goes on", "where", "it was"),
        r"writes turn 2 differently when .* \('<s>\[INST\] the </s> run \[/INST\]'\), or when",
    ),
    "a template that marks nothing": (
        chats.CHATML.replace("'assistant'", "'model'"),
        TWO_TURNS,
        "marks no assistant text by {% generation %}",
    ),
    "a template that opens a thought": (
        chats.CHATML_UNMARKED.replace(
            "assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}"
        ),
        TWO_TURNS[:2],
        r"writes turn 2 differently when it only begins the reply \('.*<think>\\n'\), or",
    ),
    "a template that executes": (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        TWO_TURNS,
        "the chat template refuses",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_a_conversation_that_cannot_be_told_is_a_sentence(name):
    template, messages, sentence = ODD[name]
    with pytest.raises(ChatError, match=sentence):
        encoded(template_of(template), messages)


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(DataError, match=r"here has no chat template.*Name a model"):
        ChatTemplate(chats.tokenizer(template=None), "here")


@pytest.fixture
def prepare(prepare, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    usual = {"val_fraction": 0.3, "block_size": 64, "documents": "conversations"}

    def prepare_chats(source, template=chats.CHATML, **changes):
        chats.tokenizer(template).save(folder)
        return prepare(source, tokenizer=folder, **usual, **changes)

    return prepare_chats


FEW = [chats.said(f"question {i}", f"answer {i}", "and", "so on " * i) for i in range(6)]


def test_a_conversation_has_the_same_tokens_on_every_day(prepare, tmp_path):
    """As Llama 3.2's template, which writes today's date into every conversation."""
    dated = "{{ strftime_now('%d %b %Y') }}" + chats.CHATML
    corpus = prepare(chats.write(tmp_path / "chat.jsonl", FEW), dated)
    text = corpus.tokenizer.decode(corpus.train.tokens.window(0, 30))
    assert text.startswith("26 Jul 2024<|im_start|>user")


FIRST_OF_SEVERAL = [{"prompt": None, "completion": None, "messages": FEW[0]}]
ROWS = {
    "messages": [{"messages": chat} for chat in FEW],
    "messages of some rows": FIRST_OF_SEVERAL
    + [{"prompt": chat[:-1], "completion": chat[-1:], "messages": None} for chat in FEW[1:]],
    "prompt and completion": [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in FEW],
    "texts": [{"prompt": one["content"], "completion": two["content"]} for one, two, *_ in FEW],
    "messages and a text": [
        {"prompt": [one], "completion": two["content"]} for one, two, *_ in FEW
    ],
    "a text and messages": [
        {"prompt": one["content"], "completion": [two]} for one, two, *_ in FEW
    ],
}
"""The same conversations, or their first turns, as each kind of file has them."""


@pytest.mark.parametrize("kind", ROWS)
def test_a_prepared_conversation_is_what_its_template_encodes(prepare, tmp_path, kind):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind]))
    corpus = prepare(path)
    template = ChatTemplate(corpus.tokenizer, "here")
    messages = [chat[:2] if "text" in kind else chat for chat in FEW]
    expected = [template.encode(Conversation(chat), 65) for chat in messages]
    found = conversations_of(corpus)
    assert found == [(chat.ids.tolist(), chat.trained.tolist()) for chat in expected]
    counts = [*corpus.train.counts, *corpus.held_out.counts]
    assert counts == [sum(trained) for _, trained in found]
    held_out = expected[-len(corpus.held_out.ends) :]
    assert corpus.info.held_out_bytes == sum(chat.text_bytes for chat in held_out)
    assert corpus.info.held_out_targets == sum(int(chat.trained.sum()) for chat in held_out)
    question = corpus.tokenizer.decode(corpus.prompt())
    assert question.endswith("<|im_start|>assistant\n")


def test_what_is_shortened_and_left_out_is_counted(prepare, tmp_path):
    left_out, shortened = ("so on " * 40, "yes"), ("the run", "goes on", "so on " * 40, "yes")
    long = [chats.said(*left_out), chats.said(*shortened)]
    info = prepare(chats.write(tmp_path / "chat.jsonl", [*long, *FEW[:4]])).info
    assert (info.left_out, info.shortened, info.documents) == (1, 1, 5)


WRONG = {
    "empty messages": ([*FEW, []], "row 7 of chat.jsonl: it has no reply to train on"),
    "no content": ([*FEW, [{"role": "user"}]], "row 7 of chat.jsonl cannot be read: it has"),
    "no list": (
        [*FEW, "go"],
        "row 7 of chat.jsonl cannot be read: it has no list of messages: 'go'.",
    ),
    "only empty replies": ([chats.said("a", "")] * 4, "all held-out replies are empty"),
    "one alone": (FEW[:1], "has one conversation. Use two or more"),
    "all too long": (
        [chats.said("so on " * 80, "yes")] * 4,
        "0 held out, and 4 longer than data.block_size; data.block_size=64 needs at least 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_rows_without_conversations_are_refused_by_number(prepare, tmp_path, name):
    rows, sentence = WRONG[name]
    with pytest.raises(DataError, match=re.escape(sentence)):
        prepare(chats.write(tmp_path / "chat.jsonl", rows))


@pytest.mark.parametrize(
    ("name", "content", "column", "sentence"),
    [
        ("a.txt", "the run", "text", r"needs a column messages, or .*a\.txt has: text\. Name"),
        ("a.jsonl", '{"body": "the run"}', "text", r"needs a column messages, or .* has: body\."),
        ("a.jsonl", '{"messages": []}', "mesages", r"=mesages is not a column of .*: messages"),
    ],
)
def test_other_sources_are_refused_with_what_they_have(
    prepare, tmp_path, name, content, column, sentence
):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=sentence):
        prepare(tmp_path / name, text_column=column)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        *(
            (["data.documents=conversations", *tokenizer], "needs a tokenizer with")
            for tokenizer in ([], ["data.tokenizer=char"], ["data.tokenizer=bpe:300"])
        ),
        (["data.documents=rows"], "must be packed, masked or conversations"),
    ],
)
def test_conversations_need_a_tokenizer_with_a_template(words, sentence):
    with pytest.raises(ConfigError, match=rf"data\.documents=\w+ {sentence}"):
        load_config(words)
