"""What is trained: GPT-2, its sizes, and generation. Needs torch and nothing else."""
