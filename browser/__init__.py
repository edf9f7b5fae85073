"""The page that runs a model in the browser, and the Space that serves it."""
