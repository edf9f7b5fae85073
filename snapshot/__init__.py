"""How a run survives: what a snapshot holds, and how it is written, verified and read.

A snapshot is a folder of safetensors and JSON files; nothing in it can execute. Knows nothing of
Hydra.
"""
