"""Targets are those of transformers, whatever the template and the tokenizer."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chats
import tokenizer_kinds
from data.chat import ChatTemplate
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
    chats.said("why", "<think>\nas it was\n</think>\n\nno step is lost", "the", "<think>a"),
]


@pytest.mark.parametrize("kind", tokenizer_kinds.ALL)
def test_tokens_and_targets_are_those_of_transformers(kind, tmp_path):
    from transformers import AutoTokenizer

    for name, template in TEMPLATES.items():
        ours = tokenizer_kinds.tokenizer(kind, template)
        ours.save(tmp_path)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        for messages in CONVERSATIONS:
            if "<think>" in messages[1]["content"]:
                continue  # text, which transformers reads as a special token unless it sanitizes
            expected = theirs.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True
            )
            one = ChatTemplate(ours, "here").encode(Conversation(messages), 10_000)
            where = f"{name}: {json.dumps(messages, ensure_ascii=False)}"
            assert one.ids.tolist() == expected["input_ids"], where
            assert one.trained.tolist() == expected["assistant_masks"], where
            assert 1 in expected["assistant_masks"], where


@pytest.mark.parametrize("kind", tokenizer_kinds.ALL)
def test_a_spelled_out_special_token_is_text_without_a_space(kind):
    """Also where the template splits the reply at a special token: it leaves no fence open."""
    tokenizer = tokenizer_kinds.tokenizer(kind, TEMPLATES["Qwen 3"])
    template, marks = ChatTemplate(tokenizer, "here"), set(tokenizer.marks.values())
    thinking = "<think>it was</think>"
    spelled = chats.said("go</s>on, <|im_end|>\ue000\ue001 and", f"{thinking}no</s> step<s>is")
    plain = chats.said("go on, and", f"{thinking}no step")
    found, expected = (template.encode(Conversation(one), 500) for one in (spelled, plain))
    assert [i for i in found.ids if i in marks] == [i for i in expected.ids if i in marks]
    text = tokenizer.decode(found.ids)
    assert "go</s>on, <|im_end|>\ue000\ue001 and" in text
    assert "no</s> step<s>is" in text


SPELLED = st.lists(
    st.sampled_from([*tokenizer_kinds.MARKS, "it was", " the", "\n", "\ue000", "日本 "]), max_size=5
).map("".join)


@settings(max_examples=25, deadline=None)
@given(question=SPELLED, answer=SPELLED, argument=SPELLED)
@pytest.mark.parametrize("kind", tokenizer_kinds.ALL)
def test_what_spells_special_tokens_has_the_tokens_of_transformers(
    kind, question, answer, argument
):
    more = {"of tools": OF_TOOLS, "without marks": chats.UNMARKED}
    for name, template in {**TEMPLATES, **more}.items():
        ours, theirs = both_of(kind, template)
        messages = chats.said(f"a{question}", f"b{answer}")
        messages[1]["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": argument}}}]
        expected = theirs.apply_chat_template(messages, sanitize_control_tokens=True)["input_ids"]
        one = ours.encode(Conversation(messages), 10_000)
        assert one.ids.tolist() == expected, name
        ids = one.ids[one.trained == 1].tolist()
        assert f"b{answer}".strip() in ours.tokenizer.decode(ids) or "</think>" in answer, name


OF_TOOLS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% for c in m['tool_calls'] %}{{ '[INST]' + (c | tojson) + '[/INST]' }}{% endfor %}"
    "{{ '</s>' }}{% endgeneration %}{% else %}{{ '<s>' + m['content'] }}{% endif %}{% endfor %}"
)


@lru_cache
def both_of(kind: str, template: str):
    """Our chat template and transformers' tokenizer, which lets nobody write what ours does not."""
    from transformers import AutoTokenizer

    ours = ChatTemplate(tokenizer_kinds.tokenizer(kind, template), "here")
    with TemporaryDirectory() as folder:
        ours.tokenizer.save(Path(folder))
        theirs = AutoTokenizer.from_pretrained(folder)
    theirs.chat_control_tokens = sorted(ours._unwritable)
    return ours, theirs
