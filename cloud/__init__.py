"""A run on a rented machine: an image, manifests and job scripts, and what they all start."""
