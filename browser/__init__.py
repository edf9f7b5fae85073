"""A Gradio Space that speaks with a run's model."""
