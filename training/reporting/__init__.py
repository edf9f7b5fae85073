"""What a person sees of a run: console, metrics, curves."""
