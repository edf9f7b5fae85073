"""The page that computes a model in the browser, and the Space that serves it."""
