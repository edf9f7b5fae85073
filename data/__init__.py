"""What is trained on: text, tokens, and the order in which a run reads them."""
