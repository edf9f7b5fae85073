"""A run on a rented machine: an image, manifests, job scripts and the program they start."""
