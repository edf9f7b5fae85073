"""What a step does: train.py under torch's profiler, as a trace and a table of collectives."""
