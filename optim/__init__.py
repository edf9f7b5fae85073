"""Optimizers and learning-rate schedules by name: how each is built, what it keeps, its rates."""
