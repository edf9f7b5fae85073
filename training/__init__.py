"""How a model is trained: configuration, optimizer, schedule, progress, evaluation, reporting."""
