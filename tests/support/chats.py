"""Chat models for tests: templates, a tokenizer that has their marks, and conversations."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

import families
from data.subwords import SubwordTokenizer
from subword_folders import trained

MARKS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|head|>' + m['role'] + '<|/head|>\n\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] | trim + '<|eot|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
UNMARKED = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
FORGETFUL = UNMARKED.replace("' ' + m['content']", "(' ' + m['content'] if loop.last else ' ...')")
"""It writes a reply in full only where it is the last: nothing tells the others apart."""
TEMPLATES = {"ChatML": CHATML, "Llama 3": LLAMA, "without marks": UNMARKED}


def tokenizer(template: str | None = CHATML, end: str = "<|im_end|>") -> SubwordTokenizer:
    """Byte-level BPE with the marks of all templates, 307 tokens."""
    rust = Tokenizer.from_buffer(trained(300)._content)
    rust.add_special_tokens(list(MARKS))
    settings = {"eos_token": end, "bos_token": "<s>"}
    settings |= {} if template is None else {"chat_template": template}
    return SubwordTokenizer(rust.to_str().encode(), settings, "the tokenizer")


def make(family: str, folder: Path, template: str | None = CHATML) -> Path:
    """Save a random model of a family as a chat model. Returns the folder."""
    families.make(family, folder)
    tokenizer(template).save(folder)
    return folder


def said(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation, in which the user begins."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return ([] if system is None else [{"role": "system", "content": system}]) + turns


def write(path: Path, conversations: list[list[dict[str, str]]]) -> Path:
    """JSON lines with a conversation each. Returns the path."""
    lines = (json.dumps({"messages": messages}) for messages in conversations)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
