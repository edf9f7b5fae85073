"""Who computes: the launch, what is refused, agreement between processes, timeouts, compile."""
