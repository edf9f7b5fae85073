"""Every key of a run: its YAML presets, its schema, what is checked, and the help text."""
