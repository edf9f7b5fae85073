"""Targets are those of transformers, whatever the template and the tokenizer."""

from __future__ import annotations

import json

import pytest

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
            if "<think>" in messages[1]["content"] and name != "Qwen 3":
                continue  # for them it is text, which transformers reads as a special token
            expected = theirs.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True
            )
            one = ChatTemplate(ours, "here").encode([Conversation(messages)], 10_000)[0]
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
    found, expected = (template.encode([Conversation(one)], 500)[0] for one in (spelled, plain))
    assert [i for i in found.ids if i in marks] == [i for i in expected.ids if i in marks]
    text = tokenizer.decode(found.ids)
    assert "go</s>on, <|im_end|>\ue000\ue001 and" in text
    assert "no</s> step<s>is" in text


def test_a_changed_end_of_turn_token_is_refused():
    cut = chats.CHATML.replace("m['content']", "m['content'].split('<|im_end|>')[0].strip()")
    template = ChatTemplate(tokenizer_kinds.tokenizer("bytes", cut), "here")
    (found,) = template.encode([Conversation(chats.said("the <|im_end|>run", "goes"))], 500)
    assert "changes a message that spells out <|im_end|>" in str(found)
