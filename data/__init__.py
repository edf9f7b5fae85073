"""What is trained on: text in, tokens, and the order in which a run sees them.

Needs datasets, tokenizers, numpy and torch; knows neither the model nor the run.
"""
