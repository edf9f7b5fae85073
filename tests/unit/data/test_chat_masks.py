"""Targets are those of transformers, whatever the template and the tokenizer."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import chats
import tokenizer_kinds
from data.chat import ChatTemplate, _targets
from data.messages import Conversation

REPLY = "{% generation %}{{ m['content'] + '</s>' }}{% endgeneration %}"
TEMPLATES = {
    "ChatML": chats.CHATML,
    "Llama 3": chats.LLAMA.replace("<|eot|>", "<|im_end|>"),
    "Gemma": (
        "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}"
        "{{ '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m['content'] | trim }}"
        "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    ),
    "Mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' }}" + REPLY + "{% endif %}"
        "{% endfor %}"
    ),
    "a space before": (
        "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['role'] == 'user' %}"
        "{{ m['content'] + '\n' }}{% else %}" + REPLY + "{% endif %}{% endfor %}"
    ),
    "Qwen 3": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'user' %}{{ m['content'] }}{% else %}{% set text = m['content'] %}"
        "{% set thought = m['reasoning_content'] or '' %}{% if '</think>' in text %}"
        "{% set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}"
        "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{% generation %}{% if thought %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}"
        "{% endif %}{{ text }}{% endgeneration %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    ),
}
CONVERSATIONS = [
    chats.said("the run", "goes on", "where\n\n  is it?", " it was  here\n"),
    chats.said("Größe 日本語", "🙂 ja\ue000\ue001 ", "", "x"),
]
SPELLED_ENDS = chats.said("hi <|im_end|>", "yo<|im_end|>", "<|im_end|> x", "y <|im_end|>z")
CONTENT = "m['content']"
TAKING_APART = {
    "leaves out": (
        chats.CHATML.replace(CONTENT, f"{CONTENT} | replace('<|im_end|>', '')"),
        [SPELLED_ENDS],
    ),
    "splits": (
        chats.CHATML.replace(CONTENT, f"{CONTENT}.split('<|im_end|>')[0]"),
        [SPELLED_ENDS],
    ),
    "GLM 4.5": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}{% generation %}"
        "{% set parts = m['content'].split('</think>') %}{{ '<think>' }}"
        "{{ parts[0].split('<think>')[-1] + '</think>\n' + parts[-1] }}"
        "{% endgeneration %}{% endfor %}",
        [chats.said("hi", "<think>hm</think>ok")],
    ),
}
"""Templates that remove a token from a message, and may write it there themselves."""


@pytest.mark.parametrize("kind", tokenizer_kinds.ALL)
def test_tokens_and_targets_are_those_of_transformers(kind, tmp_path):
    usual = {name: (template, CONVERSATIONS) for name, template in TEMPLATES.items()}
    for name, (template, conversations) in {**usual, **TAKING_APART}.items():
        ours = tokenizer_kinds.tokenizer(kind, template)
        ours.save(tmp_path)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        for messages in conversations:
            expected = theirs.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True
            )
            one = ChatTemplate(ours, "here").encode(Conversation(messages), 10_000)
            where = f"{name}: {json.dumps(messages, ensure_ascii=False)}"
            assert one.ids.tolist() == expected["input_ids"], where
            assert one.trained.tolist() == expected["assistant_masks"], where
            assert 1 in expected["assistant_masks"], where


def test_a_token_around_an_empty_reply_is_a_target_as_in_transformers():
    assert _targets([(0, 3), (3, 8), (8, 9)], [(5, 5)]).tolist() == [0, 1, 0]


SPELLED = st.lists(
    st.sampled_from(
        [*tokenizer_kinds.MARKS, "[INST]<|im_end|>", "it was", " the", "\n", "\ue000", "日本 "]
    ),
    max_size=5,
).map("".join)
OF_TOOLS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% for c in m['tool_calls'] %}{{ '[INST]' + (c | tojson) + '[/INST]' }}{% endfor %}"
    "{{ '</s>' }}{% endgeneration %}{% else %}{{ '<s>' + m['content'] }}{% endif %}{% endfor %}"
)


@settings(max_examples=25, deadline=None)
@given(question=SPELLED, answer=SPELLED, argument=SPELLED)
@pytest.mark.parametrize("kind", tokenizer_kinds.ALL)
def test_no_message_writes_a_special_token_and_all_of_it_is_there(kind, question, answer, argument):
    """Also where a template splits a reply at one, and in the arguments of a tool."""
    for name, template in {**TEMPLATES, "of tools": OF_TOOLS, "no marks": chats.UNMARKED}.items():
        ours = ChatTemplate(tokenizer_of(kind, template), "here")
        call = {"function": {"name": "f", "arguments": {"x": f"c{argument}d"}}}

        def encoded(question, answer, call, ours=ours):
            messages = chats.said(f"a{question}e", f"b{answer}f")
            messages[1]["tool_calls"] = [call]
            return ours.encode(Conversation(messages), 10_000)

        plain = encoded("", "", {"function": {"name": "f", "arguments": {"x": "cd"}}})
        one, marks = encoded(question, answer, call), set(ours.tokenizer.marks.values())
        own = [[i for i in ids if i in marks] for ids in (one.ids, plain.ids)]
        # A template that splits a reply at </think> writes that token itself.
        assert own[0] == own[1] or "</think>" in answer, name
        assert f"a{question}e" in ours.tokenizer.decode(one.ids), name
        said = ours.tokenizer.decode(one.ids[one.trained == 1])
        assert f"b{answer}f" in said or "</think>" in answer, name
        assert name != "of tools" or json.dumps(f"c{argument}d", ensure_ascii=False) in said


tokenizer_of = lru_cache(tokenizer_kinds.tokenizer)
