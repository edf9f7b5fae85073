"""A snapshot as a folder: its files, tensors and contents."""
