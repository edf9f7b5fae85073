"""What is trained: GPT-2, its sizes, and text generation. Needs only torch."""
