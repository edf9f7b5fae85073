"""In what servers that speak the Hub's protocol differ from huggingface.co."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deviations:
    """Each was met at a self-hosted server; none by default."""

    no_error_codes: bool = False
    """Errors come without X-Error-Code and X-Error-Message."""
    no_whoami: bool = False
    no_paths_info: bool = False
    parent_ignored: bool = False
    """A commit goes on top of whatever the head is."""
    prefixed_hashes: bool = False
    """Listings have `sha256:` before a large file's digits."""
    long_ids: bool = False
    """Commit ids have 64 digits, which the client refuses as a parent."""
    no_deletion: bool = False
    """Large files cannot be deleted one by one."""
    no_pull_requests: bool = False
    """Nothing is said of them among the refs."""
    private_ignored: bool = False
    """Every repo is public, whatever its creation asks for."""

    def without(self, endpoint: str) -> bool:
        """Whether nothing answers there."""
        missing = {
            "whoami": self.no_whoami,
            "paths-info": self.no_paths_info,
            "lfs-delete": self.no_deletion,
        }
        return missing.get(endpoint, False)


ALL = Deviations(*[True] * 8)
