"""What a step does: train.py under torch's profiler, its collectives and its memory on a page."""
