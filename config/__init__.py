"""Every key of a run: its YAML presets, its schema, its checks and the help text."""
