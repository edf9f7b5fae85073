"""Reads files as rows of text, from disk, HTTP, fsspec stores and the Hub, prepared or streamed."""
