"""Whether a set-up keeps what this project promises, checked with short attempts of its own run."""
