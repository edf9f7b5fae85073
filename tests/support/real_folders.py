"""Folders of models as their repos on the Hub have them, with tiny random weights.

config.json, generation_config.json, tokenizer_config.json and special_tokens_map.json have the
entries of the real files; sizes are smaller, and special tokens have the numbers that a vocabulary
of a few hundred gives them. transformers writes more into these files than the repos hold, and so
tests with folders that it has just saved see other models than users do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import ByteLevel, TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM

from subword_folders import WORDS

TOKENS = 320
"""Without special tokens."""
CONTEXT = 48
EMBEDDINGS = ("wte.weight", "embed_tokens.weight")
LONGEST = 1000000000000000019884624838656
"""What transformers writes for a length without limit."""
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3_CHAT = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 "
    "%}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{{ "
    "'<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
)
GEMMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + (message['role'] if "
    "message['role'] == 'user' else 'model') + '\\n' + message['content'] | trim + "
    "'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}"
    "{% endif %}"
)
PHI3_CHAT = (
    "{% for message in messages %}{{'<|' + message['role'] + '|>\\n' + message['content'] + "
    "'<|end|>\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}"
    "{{ eos_token }}{% endif %}"
)


def token(content: str, **flags: bool) -> dict[str, Any]:
    """A special token as an object of tokenizer_config.json."""
    usual = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, **usual, **flags}


@dataclass(frozen=True)
class Kind:
    """One repo."""

    config: dict[str, Any]
    """config.json. Texts that are special tokens stand for their ids."""
    generation: dict[str, Any]
    """generation_config.json, likewise."""
    special: tuple[str, ...]
    """The special tokens of tokenizer.json, which follow the others."""
    settings: dict[str, Any]
    """tokenizer_config.json."""
    pieces: bool = False
    """Whether the vocabulary is SentencePiece's, whose special tokens come first."""
    special_map: dict[str, Any] | None = None
    """special_tokens_map.json."""
    begins: str | None = None
    """The token that the post-processor of tokenizer.json puts before a text."""
    beyond: str | None = None
    """A special token whose id has no row in the embedding."""
    lists_added: bool = True
    """Whether tokenizer_config.json lists the added tokens by id."""
    normalizer: Any = None
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = field(default=dict)
    """What the file of weights has in place of what transformers writes."""


def gpt2_file(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """OpenAI's own: without the prefix, and with the mask of each layer."""
    bare = {name.removeprefix("transformer."): one for name, one in tensors.items()}
    mask = torch.ones(CONTEXT, CONTEXT).tril()[None, None]
    return bare | {f"h.{layer}.attn.bias": mask.clone() for layer in range(2)}


def with_copied_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the tied output layer a second time, and the masks."""
    mask = torch.ones(CONTEXT, CONTEXT).tril()[None, None]
    masks = {f"transformer.h.{layer}.attn.bias": mask.clone() for layer in range(2)}
    return tensors | masks | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}


def with_rotations(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the constants of older transformers."""
    names = (f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2))
    return tensors | {name: torch.ones(4) for name in names}


GPT2_CONFIG = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": "<|endoftext|>",
    "embd_pdrop": 0.1,
    "eos_token_id": "<|endoftext|>",
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": CONTEXT,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": CONTEXT,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}
ENDS = {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|endoftext|>"}
GPT2 = Kind(
    GPT2_CONFIG,
    {"_from_model_config": True, **ENDS, "transformers_version": "4.26.0.dev0"},
    ("<|endoftext|>",),
    {"model_max_length": 1024},
    lists_added=False,
    change=gpt2_file,
)
NARROW = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "use_cache": True,
}
SP_SETTINGS = {
    "bos_token": "<s>",
    "clean_up_tokenization_spaces": False,
    "eos_token": "</s>",
    "model_max_length": LONGEST,
    "pad_token": None,
    "sp_model_kwargs": {},
    "tokenizer_class": "LlamaTokenizer",
    "unk_token": "<unk>",
    "use_default_system_prompt": False,
}
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_SETTINGS = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "bos_token": None,
    "chat_template": CHATML,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "errors": "replace",
    "model_max_length": 131072,
    "pad_token": "<|endoftext|>",
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}
QWEN_GENERATION = {
    "bos_token_id": "<|endoftext|>",
    "do_sample": True,
    "eos_token_id": ["<|im_end|>", "<|endoftext|>"],
    "pad_token_id": "<|endoftext|>",
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "transformers_version": "4.37.0",
}
KINDS: dict[str, Kind] = {
    "gpt2": GPT2,
    "distilgpt2": Kind(
        {
            **GPT2_CONFIG,
            "_num_labels": 1,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        },
        {"_from_model_config": True, **ENDS, "transformers_version": "4.26.0.dev0"},
        ("<|endoftext|>",),
        {"model_max_length": 1024},
        lists_added=False,
        change=with_copied_head,
    ),
    "gpt2-xl": Kind(
        {**GPT2_CONFIG, "output_past": True},
        {"_from_model_config": True, **ENDS, "transformers_version": "4.26.0.dev0"},
        ("<|endoftext|>",),
        {"model_max_length": 1024},
        lists_added=False,
        change=gpt2_file,
    ),
    "Llama-2-7b-hf": Kind(
        {
            "_name_or_path": "meta-llama/Llama-2-7b-hf",
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": "<s>",
            "eos_token_id": "</s>",
            "hidden_act": "silu",
            "model_type": "llama",
            "pretraining_tp": 1,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformers_version": "4.31.0.dev0",
            **NARROW,
        },
        {
            "bos_token_id": "<s>",
            "do_sample": True,
            "eos_token_id": "</s>",
            "pad_token_id": "<unk>",
            "temperature": 0.6,
            "max_length": 4096,
            "top_p": 0.9,
            "transformers_version": "4.31.0.dev0",
        },
        ("<unk>", "<s>", "</s>"),
        {
            **SP_SETTINGS,
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": {"__type": "AddedToken", **token("<s>")},
            "eos_token": {"__type": "AddedToken", **token("</s>")},
            "legacy": False,
            "padding_side": "right",
            "unk_token": {"__type": "AddedToken", **token("<unk>")},
        },
        pieces=True,
        special_map={
            f"{name}_token": token(text)
            for name, text in (("bos", "<s>"), ("eos", "</s>"), ("unk", "<unk>"))
        },
        begins="<s>",
        lists_added=False,
        change=with_rotations,
    ),
    "Meta-Llama-3-8B-Instruct": Kind(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": "<|begin_of_text|>",
            "eos_token_id": "<|eot_id|>",
            "hidden_act": "silu",
            "model_type": "llama",
            "pretraining_tp": 1,
            "rope_scaling": None,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.40.0.dev0",
            **NARROW,
        },
        {
            "bos_token_id": "<|begin_of_text|>",
            "do_sample": True,
            "eos_token_id": ["<|end_of_text|>", "<|eot_id|>"],
            "max_length": 4096,
            "temperature": 0.6,
            "top_p": 0.9,
            "transformers_version": "4.40.0.dev0",
        },
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ),
        {
            "bos_token": "<|begin_of_text|>",
            "chat_template": LLAMA3_CHAT,
            "clean_up_tokenization_spaces": True,
            "eos_token": "<|eot_id|>",
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": LONGEST,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        special_map={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        begins="<|begin_of_text|>",
    ),
    "Qwen2.5-0.5B-Instruct": Kind(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": "<|endoftext|>",
            "eos_token_id": "<|im_end|>",
            "hidden_act": "silu",
            "max_window_layers": 21,
            "model_type": "qwen2",
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.43.1",
            "use_sliding_window": False,
            **NARROW,
        },
        {**QWEN_GENERATION, "repetition_penalty": 1.1},
        QWEN_SPECIAL,
        QWEN_SETTINGS,
        normalizer=normalizers.NFC(),
    ),
    "Qwen3-0.6B": Kind(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": "<|endoftext|>",
            "eos_token_id": "<|im_end|>",
            "head_dim": 16,
            "hidden_act": "silu",
            "max_window_layers": 28,
            "model_type": "qwen3",
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.51.0",
            "use_sliding_window": False,
            **NARROW,
        },
        {**QWEN_GENERATION, "temperature": 0.6, "top_p": 0.95, "transformers_version": "4.51.0"},
        QWEN_SPECIAL,
        QWEN_SETTINGS,
        normalizer=normalizers.NFC(),
    ),
    "gemma-3-1b-it": Kind(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "bos_token_id": "<bos>",
            "cache_implementation": "hybrid",
            "eos_token_id": ["<eos>", "<end_of_turn>"],
            "final_logit_softcapping": None,
            "head_dim": 16,
            "hidden_activation": "gelu_pytorch_tanh",
            "model_type": "gemma3_text",
            "pad_token_id": "<pad>",
            "query_pre_attn_scalar": 16,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.50.0.dev0",
            **NARROW,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-06,
        },
        {
            "cache_implementation": "hybrid",
            "do_sample": True,
            "eos_token_id": ["<eos>", "<end_of_turn>"],
            "top_k": 64,
            "top_p": 0.95,
            "transformers_version": "4.50.0.dev0",
        },
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        {
            "add_bos_token": True,
            "add_eos_token": False,
            "boi_token": "<start_of_image>",
            "bos_token": "<bos>",
            "chat_template": GEMMA_CHAT,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<eos>",
            "extra_special_tokens": {"image_token": "<image_soft_token>"},
            "model_max_length": LONGEST,
            "pad_token": "<pad>",
            "sp_model_kwargs": None,
            "spaces_between_special_tokens": False,
            "tokenizer_class": "GemmaTokenizer",
            "unk_token": "<unk>",
            "use_default_system_prompt": False,
        },
        pieces=True,
        special_map={
            "boi_token": "<start_of_image>",
            "bos_token": token("<bos>"),
            "eos_token": token("<eos>"),
            "pad_token": token("<pad>"),
            "unk_token": token("<unk>"),
        },
        begins="<bos>",
        beyond="<image_soft_token>",
        normalizer=normalizers.Replace(" ", "▁"),
    ),
    "SmolLM2-135M": Kind(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": "<|endoftext|>",
            "eos_token_id": "<|endoftext|>",
            "hidden_act": "silu",
            "is_llama_config": True,
            "mlp_bias": False,
            "model_type": "llama",
            "pretraining_tp": 1,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.40.1",
            **NARROW,
        },
        {"_from_model_config": True, **ENDS, "transformers_version": "4.40.1"},
        QWEN_SPECIAL,
        {
            "add_prefix_space": False,
            "additional_special_tokens": list(QWEN_SPECIAL),
            "bos_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|endoftext|>",
            "model_max_length": 8192,
            "tokenizer_class": "GPT2Tokenizer",
            "unk_token": "<|endoftext|>",
            "vocab_size": 49152,
        },
        special_map={
            "additional_special_tokens": list(QWEN_SPECIAL),
            **{f"{name}_token": token("<|endoftext|>") for name in ("bos", "eos", "unk")},
        },
    ),
    "OLMo-2-0425-1B": Kind(
        {
            "architectures": ["Olmo2ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "eos_token_id": "<|endoftext|>",
            "hidden_act": "silu",
            "model_type": "olmo2",
            "pad_token_id": "<|pad|>",
            "rope_scaling": None,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "transformers_version": "4.50.0",
            **NARROW,
            "rms_norm_eps": 1e-06,
        },
        {
            "_from_model_config": True,
            "eos_token_id": "<|endoftext|>",
            "pad_token_id": "<|pad|>",
            "transformers_version": "4.50.0",
        },
        ("<|endoftext|>", "<|pad|>"),
        {
            "add_prefix_space": False,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|endoftext|>",
            "errors": "replace",
            "extra_special_tokens": {},
            "model_max_length": 8192,
            "pad_token": "<|pad|>",
            "tokenizer_class": "GPT2Tokenizer",
            "unk_token": "<|endoftext|>",
        },
        special_map={
            "eos_token": "<|endoftext|>",
            "pad_token": "<|pad|>",
            "unk_token": "<|endoftext|>",
        },
    ),
    "Phi-3-mini-4k-instruct": Kind(
        {
            "_name_or_path": "Phi-3-mini-4k-instruct",
            "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "auto_map": {
                "AutoConfig": "configuration_phi3.Phi3Config",
                "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
            },
            "bos_token_id": "<s>",
            "embd_pdrop": 0.0,
            "eos_token_id": "<|endoftext|>",
            "hidden_act": "silu",
            "model_type": "phi3",
            "original_max_position_embeddings": CONTEXT,
            "pad_token_id": "<|endoftext|>",
            "resid_pdrop": 0.0,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "sliding_window": 2047,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.40.2",
            **NARROW,
            "num_key_value_heads": 4,
        },
        {
            "_from_model_config": True,
            "bos_token_id": "<s>",
            "eos_token_id": ["<|endoftext|>", "<|assistant|>", "<|end|>"],
            "pad_token_id": "<|endoftext|>",
            "transformers_version": "4.39.3",
        },
        ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"),
        {
            **SP_SETTINGS,
            "add_bos_token": False,
            "add_eos_token": False,
            "chat_template": PHI3_CHAT,
            "eos_token": "<|endoftext|>",
            "legacy": False,
            "model_max_length": 4096,
            "pad_token": "<|endoftext|>",
            "padding_side": "left",
        },
        pieces=True,
        special_map={
            "bos_token": token("<s>"),
            "eos_token": token("<|endoftext|>"),
            "pad_token": token("<|endoftext|>"),
            "unk_token": token("<unk>"),
        },
        begins="<s>",
    ),
    "Mixtral-8x7B-v0.1": Kind(
        {
            "architectures": ["MixtralForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": "<s>",
            "eos_token_id": "</s>",
            "hidden_act": "silu",
            "model_type": "mixtral",
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "output_router_logits": False,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.36.0.dev0",
            **NARROW,
        },
        {
            "_from_model_config": True,
            "bos_token_id": "<s>",
            "eos_token_id": "</s>",
            "transformers_version": "4.36.0.dev0",
        },
        ("<unk>", "<s>", "</s>"),
        {
            **SP_SETTINGS,
            "add_bos_token": True,
            "add_eos_token": False,
            "additional_special_tokens": [],
            "legacy": True,
            "spaces_between_special_tokens": False,
        },
        pieces=True,
        special_map={
            f"{name}_token": token(text)
            for name, text in (("bos", "<s>"), ("eos", "</s>"), ("unk", "<unk>"))
        },
        begins="<s>",
    ),
}


def make(name: str, folder: Path, **entries: Any) -> Path:
    """Write the folder of a model, with `entries` of config.json; returns it."""
    kind = KINDS[name]
    folder.mkdir(parents=True)
    tokenizer = _pieces(kind) if kind.pieces else _bytes(kind)
    rows = tokenizer.get_vocab_size()
    if kind.beyond is not None:
        tokenizer.add_special_tokens([AddedToken(kind.beyond, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))

    def numbered(value: Any) -> Any:
        if isinstance(value, list):
            return [numbered(one) for one in value]
        return tokenizer.token_to_id(value) if isinstance(value, str) else value

    def with_ids(content: dict[str, Any]) -> dict[str, Any]:
        return {key: numbered(one) if "token_id" in key else one for key, one in content.items()}

    config = {**with_ids(kind.config), "vocab_size": rows, **entries}
    settings = dict(kind.settings)
    if kind.lists_added:
        added = tokenizer.get_added_tokens_decoder().items()
        settings["added_tokens_decoder"] = {
            str(number): {**token(one.content), "special": one.special} for number, one in added
        }
    files = {
        "config.json": config,
        "generation_config.json": with_ids(kind.generation),
        "tokenizer_config.json": settings,
        "special_tokens_map.json": kind.special_map,
    }
    for file, content in files.items():
        if content is not None:
            (folder / file).write_text(json.dumps(content, indent=2))
    _write_weights(folder, kind, config)
    return folder


def _write_weights(folder: Path, kind: Kind, config: dict[str, Any]) -> None:
    torch.manual_seed(11)
    content = {key: one for key, one in config.items() if key != "auto_map"}
    built = AutoConfig.for_model(**content)
    dtype = getattr(torch, config.get("torch_dtype", "float32"))
    model = AutoModelForCausalLM.from_config(built, dtype=dtype)
    written = folder / "written"
    model.save_pretrained(written)
    tensors = load_file(written / "model.safetensors")
    for path in written.iterdir():
        path.unlink()
    written.rmdir()
    save_file(kind.change(tensors), folder / "model.safetensors", {"format": "pt"})


def _bytes(kind: Kind) -> Tokenizer:
    """Byte-level BPE, as of GPT-2 and its relatives."""
    made = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=TOKENS, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([WORDS] * 20, trainer)
    if kind.normalizer is not None:
        made.normalizer = kind.normalizer
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(one, normalized=False) for one in kind.special])
    made.post_processor = ByteLevel(trim_offsets=False)
    _begin(made, kind)
    return made


def _pieces(kind: Kind) -> Tokenizer:
    """BPE of SentencePiece with a token for each byte, as of Llama 2 and Gemma."""
    first = [*kind.special, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({*WORDS.replace(" ", "▁"), *"abcdefghijklmnopqrstuvwxyz▁"})
    vocabulary = {piece: number for number, piece in enumerate([*first, *letters])}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("o", "n")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    made = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if kind.normalizer is not None:  # Gemma's, without a space before the text
        made.normalizer = kind.normalizer
        made.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_previous")
        last = []
    else:
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        last = [decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    made.add_special_tokens([AddedToken(one, normalized=False) for one in kind.special])
    _begin(made, kind)
    return made


def _begin(made: Tokenizer, kind: Kind) -> None:
    if kind.begins is not None:
        named = [(kind.begins, made.token_to_id(kind.begins))]
        made.post_processor = TemplateProcessing(
            f"{kind.begins} $A", f"{kind.begins} $A {kind.begins}:1 $B:1", named
        )


def give_output(folder: Path) -> Path:
    """Add another output layer to the weights of a model whose config ties it; the folder."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    embedding = next(one for key, one in tensors.items() if key.endswith(EMBEDDINGS))
    torch.manual_seed(13)
    output = {"lm_head.weight": torch.randn_like(embedding)}
    save_file(tensors | output, path, {"format": "pt"})
    return folder
