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
TABLE = {
    "ChatML": (
        "<|im_start|>user\nthe run<|im_end|>\n<|im_start|>assistant\n{goes on<|im_end|>}\n"
        "<|im_start|>user\nwhere<|im_end|>\n<|im_start|>assistant\n{it was<|im_end|>}\n"
    ),
    "Llama 3": (
        "<s><|head|>user<|/head|>\n\nthe run<|eot|><|head|>assistant<|/head|>\n\n{goes on<|eot|>}"
        "<|head|>user<|/head|>\n\nwhere<|eot|><|head|>assistant<|/head|>\n\n{it was<|eot|>}"
    ),
    "without marks": ("<s>[INST] the run [/INST]{ goes on</s>}[INST] where [/INST]{ it was</s>}"),
}
"""By template, its text by hand; what is a target stands in braces."""


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(chats.tokenizer(chats.TEMPLATES.get(name, name)), "here")


def encoded(template, messages, longest=10_000):
    return template.encode(Conversation(messages), longest)


def with_braces(template, one) -> str:
    """The text of a conversation, its targets in braces."""
    text, before = "", 0
    for token, flag in zip(one.ids, one.trained, strict=True):
        text += ("{" if flag else "}") if flag != before else ""
        text += template.tokenizer.decode([token])
        before = flag
    return text + "}" * int(before)


@pytest.mark.parametrize("name", TABLE)
def test_targets_are_those_of_a_table_made_by_hand(name):
    template = template_of(name)
    one = encoded(template, TWO_TURNS)
    assert with_braces(template, one) == TABLE[name]
    spoken = re.sub(r"<.*?>", "", "".join(re.findall(r"{(.*?)}", TABLE[name])))
    assert one.text_bytes == len(spoken)


@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_a_prompt_is_what_comes_before_the_reply(name):
    template = template_of(name)
    prompt = template.encode_prompt(Conversation(TWO_TURNS[:3])).tolist()
    whole = encoded(template, TWO_TURNS)
    assert whole.ids[: len(prompt)].tolist() == prompt
    assert whole.trained[len(prompt)] == 1
    assert whole.trained[len(prompt) - 1] == 0


@pytest.mark.parametrize(
    ("name", "mark"), [("ChatML", "<|im_end|>"), ("Llama 3", "<|eot|>"), ("without marks", "</s>")]
)
def test_a_reply_ends_at_the_mark_of_its_template(name, mark):
    template = template_of(name)
    marks = template.tokenizer.marks
    assert template.stops() == {marks[mark], marks["<|im_end|>"]}


def test_a_reply_ends_at_its_end_and_not_at_its_beginning():
    whole_turn = (
        "{% for m in messages %}{% generation %}{{ '<|im_start|>' + m['role'] + '\n' + m['content']"
        " + '<|eot|>' }}{% endgeneration %}{% endfor %}"
    )
    template = template_of(whole_turn)
    assert template.stops() == {template.tokenizer.marks[one] for one in ("<|eot|>", "<|im_end|>")}
    of_parts = chats.LLAMA.replace("m['content']", "m['content'][0]['text']")
    for name in ("{{ raise_exception('no tools') }}", of_parts):  # they ask for more
        template = template_of(name)
        assert template.stops() == {template.tokenizer.marks["<|im_end|>"]}


@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_what_is_too_long_loses_whole_turns(name):
    template = template_of(name)
    messages = chats.said(*["the run", "goes on"] * 4)
    whole = encoded(template, messages)
    two = encoded(template, messages[:4])
    shortened = encoded(template, messages, longest=len(two.ids) + 2)
    assert shortened.is_shortened
    assert not whole.is_shortened
    assert shortened.ids.tolist() == two.ids.tolist()
    assert shortened.trained.tolist() == two.trained.tolist()
    assert encoded(template, messages, longest=len(whole.ids)).ids.tolist() == whole.ids.tolist()
    assert encoded(template, messages, longest=6) is None


def test_a_conversation_has_the_same_tokens_on_every_day(prepare, tmp_path):
    """As Llama 3.2's template, which writes today's date into every conversation."""
    dated = "{{ strftime_now('%d %b %Y') }}" + chats.CHATML
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
    chats.tokenizer(dated).save(tmp_path / "tokenizer")
    corpus = prepare(chats.write(tmp_path / "chat.jsonl", FEW))
    text = corpus.tokenizer.decode(corpus.train.tokens.window(0, 30))
    assert text.startswith("26 Jul 2024<|im_start|>user")


def test_of_a_conversation_that_the_assistant_begins_replies_alone_are_targets():
    template = template_of(chats.CHATML_UNMARKED)
    one = encoded(template, [{"role": "assistant", "content": "hello"}, *TWO_TURNS[:2]])
    assert with_braces(template, one).startswith("<|im_start|>assistant\n{hello<|im_end|>\n}<|im")


def test_a_question_after_the_last_reply_is_left_out():
    template = template_of("ChatML")
    one = encoded(template, TWO_TURNS[:3])
    assert one.ids.tolist() == encoded(template, TWO_TURNS[:2]).ids.tolist()


ODD = {
    "no messages": ("ChatML", [], "it has no reply to train on"),
    "no reply": ("ChatML", chats.said("the run"), "it has no reply to train on"),
    "a code point that is no character": (
        "ChatML",
        chats.said("a\ufdd0b", "c"),
        r"it has .\\ufdd0., which is reserved",
    ),
    "a role that is refused": (
        "without marks",
        [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}],
        "the chat template refuses it: roles must alternate",
    ),
    "a template that hides replies": (
        chats.FORGETFUL,
        TWO_TURNS,
        "writes turn 2 differently when",
    ),
    "a template that ends its last reply alone": (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
        "{% if loop.last and m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        TWO_TURNS,
        "writes turn 2 differently when",
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
        chats.said("the run", "the reply"),
        r"writes turn 2 differently when it only begins the reply \('.*<think>\\n'\), or",
    ),
    "a template that is broken": ("{{ nothing.at.all }}", TWO_TURNS, "the chat template refuses"),
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
    chats.tokenizer().save(folder)

    usual = {"val_fraction": 0.3, "block_size": 64, "documents": "conversations"}
    return lambda source, **changes: prepare(source, tokenizer=folder, **usual, **changes)


FEW = [chats.said(f"question {i}", f"answer {i}", "and", "so on " * i) for i in range(6)]


def rows_of(kind: str, path):
    """The same conversations, as each kind of file has them."""
    if kind == "messages":
        return chats.write(path, FEW)
    pairs = [{"prompt": one[:-1], "completion": one[-1:]} for one in FEW]
    if kind == "messages of some rows":
        pairs = [pair | {"messages": None} for pair in pairs]
        pairs[0] = {"prompt": None, "completion": None, "messages": FEW[0]}
    elif kind != "prompt and completion":
        pairs = [{"prompt": one[0]["content"], "completion": one[1]["content"]} for one in FEW]
    if kind == "messages and a text":
        pairs = [pair | {"prompt": one[:1]} for pair, one in zip(pairs, FEW, strict=True)]
    if kind == "a text and messages":
        pairs = [pair | {"completion": one[1:2]} for pair, one in zip(pairs, FEW, strict=True)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


@pytest.mark.parametrize(
    "kind",
    [
        *("messages", "messages of some rows", "prompt and completion"),
        *("texts", "messages and a text", "a text and messages"),
    ],
)
def test_a_prepared_conversation_is_what_its_template_encodes(prepare, tmp_path, kind):
    corpus = prepare(rows_of(kind, tmp_path / "chat.jsonl"))
    template = ChatTemplate(corpus.tokenizer, "here")
    messages = [one[:2] if "text" in kind else one for one in FEW]
    expected = [template.encode(Conversation(one), 65) for one in messages]
    found = conversations_of(corpus)
    assert found == [(one.ids.tolist(), one.trained.tolist()) for one in expected]
    counts = [*corpus.train.counts, *corpus.held_out.counts]
    assert counts == [sum(trained) for _, trained in found]
    held_out = expected[-len(corpus.held_out.ends) :]
    assert corpus.info.held_out_bytes == sum(one.text_bytes for one in held_out)
    assert corpus.info.held_out_targets == sum(int(one.trained.sum()) for one in held_out)
    question = corpus.tokenizer.decode(corpus.prompt())
    assert question.endswith("<|im_start|>assistant\n")


def test_what_is_shortened_and_left_out_is_counted(prepare, tmp_path):
    long = [
        chats.said("so on " * 40, "yes"),
        chats.said("the run", "goes on", "so on " * 40, "yes"),
    ]
    corpus = prepare(chats.write(tmp_path / "chat.jsonl", [*long, *FEW[:4]]))
    assert (corpus.info.left_out, corpus.info.shortened) == (1, 1)
    assert corpus.info.documents == 5


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
    with pytest.raises(DataError) as refused:
        prepare(chats.write(tmp_path / "chat.jsonl", rows))
    assert sentence in str(refused.value)


def test_other_sources_are_refused_with_what_they_have(prepare, tmp_path):
    (tmp_path / "a.txt").write_text("the run goes on")
    with pytest.raises(DataError, match=r"needs a column messages, or .*a\.txt has: text\. Name"):
        prepare(tmp_path / "a.txt")
    with pytest.raises(
        DataError, match=r"data\.text_column=mesages is not a column of .*: messages"
    ):
        prepare(chats.write(tmp_path / "b.jsonl", FEW), text_column="mesages")
    (tmp_path / "a.jsonl").write_text('{"body": "the run goes on"}\n')
    with pytest.raises(DataError, match=r"needs a column messages, or .* has: body\. Name"):
        prepare(tmp_path / "a.jsonl")


@pytest.mark.parametrize("tokenizer", [[], ["data.tokenizer=char"], ["data.tokenizer=bpe:300"]])
def test_conversations_need_a_tokenizer_with_a_template(tokenizer):
    with pytest.raises(ConfigError, match=r"data\.documents=conversations needs a tokenizer with"):
        load_config(["data.documents=conversations", *tokenizer])


def test_documents_are_of_three_kinds():
    with pytest.raises(ConfigError, match="must be packed, masked or conversations"):
        load_config(["data.documents=rows"])
