"""The program of a Space: continue a text, or talk, with the model in the folder `model`.

    pip install -r requirements.txt && python app.py

It is copied into each Space, so it imports nothing of this project.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import torch
from huggingface_hub import RepoCard
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

HERE = Path(__file__).parent
SHOWN = 8
"""Tokens that are generated before the page shows them."""
TOKENIZER: Any = AutoTokenizer.from_pretrained(HERE / "model")
MODEL: Any = AutoModelForCausalLM.from_pretrained(HERE / "model").eval()
MODEL.to("cuda" if torch.cuda.is_available() else "cpu")
CONTEXT = MODEL.config.max_position_embeddings


def text_after(ids: Any, length: int, temperature: float) -> Iterator[str]:
    """Yield what follows `ids` (1, T), longer each time, up to `length` tokens or its end.

    Where the context is full, the model reads on from its last half.
    """
    ids, start, cache = ids.to(MODEL.device), ids.shape[1], DynamicCache(config=MODEL.config)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
    ends = MODEL.generation_config.eos_token_id
    read = ids
    while (left := length - (ids.shape[1] - start)) > 0:
        if read.shape[1] >= CONTEXT:
            read, cache = read[:, -(CONTEXT // 2) :], DynamicCache(config=MODEL.config)
        count = min(SHOWN, left, CONTEXT - read.shape[1])
        options = {"max_new_tokens": count, "pad_token_id": 0, **sampling}
        mask = torch.ones_like(read)
        longer = MODEL.generate(read, attention_mask=mask, cache=cache, **options)
        ids, read = torch.cat([ids, longer[:, read.shape[1] :]], dim=1), longer
        yield TOKENIZER.decode(ids[0, start:], skip_special_tokens=True)
        if int(ids[0, -1]) in (ends if isinstance(ends, list) else [ends]):
            return


def complete(prompt: str, length: int, temperature: float) -> Iterator[str]:
    """Yield the prompt and what follows it."""
    ids = TOKENIZER(prompt or "\n", return_tensors="pt").input_ids
    yield from (prompt + text for text in text_after(ids, length, temperature))


def reply(message: str, turns: list[Any], length: int, temperature: float) -> Iterator[str]:
    """Yield the reply to a message after the turns before it, whose texts Gradio has as parts."""
    said = [
        {"role": turn["role"], "content": "".join(part["text"] for part in turn["content"])}
        for turn in turns
    ]
    said.append({"role": "user", "content": message})
    options = {"add_generation_prompt": True, "return_dict": False, "return_tensors": "pt"}
    yield from text_after(TOKENIZER.apply_chat_template(said, **options), length, temperature)


def page() -> gr.Blocks:
    """A chat where the tokenizer has a chat template; otherwise a text and what follows it."""
    settings: list[Any] = [
        gr.Slider(1, 2000, 300, step=1, label="Length in tokens"),
        gr.Slider(0, 2, 0.8, label="Temperature; 0: always the most likely token"),
    ]
    title = RepoCard.load(HERE / "README.md").data.title
    if TOKENIZER.chat_template:
        return gr.ChatInterface(reply, title=title, additional_inputs=settings)
    prompt, text = gr.Textbox(label="Prompt", lines=3), gr.Textbox(label="Text", lines=12)
    return gr.Interface(complete, [prompt, *settings], text, title=title, flagging_mode="never")


if __name__ == "__main__":
    # The system's own fonts: the page asks no other server for any.
    page().launch(theme=gr.themes.Base(font="sans-serif", font_mono="monospace"))
