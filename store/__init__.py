"""Snapshots away from this disk: a repo of the Hub, or files under any URL of fsspec."""
