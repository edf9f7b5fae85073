"""The models: GPT-2 in plain torch, models of transformers, adapters, and text generation."""
