"""A snapshot as a folder: its files, tensors and contents, and GPT-2's layout."""
