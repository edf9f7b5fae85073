"""Snapshots on the Hugging Face Hub: client, errors, download, commit, card, uploader."""
