"""One update and what measures it: optimizer, schedule, evaluation, sampling, reproducibility."""
