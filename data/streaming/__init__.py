"""Data sets that are read while they are trained on, in an order that needs no history."""
