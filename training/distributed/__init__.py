"""Processes and devices: launch, refusals, agreement between processes, timeouts, compiling."""
