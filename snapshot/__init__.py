"""A run's state, and which snapshot it resumes from. Safetensors and JSON: nothing can execute."""
