"""A text behind an address, fetched once. (`datasets` would need aiohttp for this alone.)"""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from data.errors import DataError

TIMEOUT_SECONDS = 60
PIECE_BYTES = 1 << 20


def fetched(url: str, cache_dir: Path) -> Path:
    """The file of a URL in `cache_dir`. Raises DataError when it cannot be had whole."""
    name = Path(urllib.parse.urlparse(url).path).name or "text.txt"
    target = cache_dir / "fetched" / hashlib.sha256(url.encode()).hexdigest()[:16] / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(target.suffix + ".part")
    try:
        _download(url, partial)
    except (OSError, http.client.HTTPException) as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise DataError(
            f"data.source={url} could not be fetched: {error}. Check the address and the network, "
            "or fetch the file by other means and give its path."
        ) from error
    return partial.rename(target)


def _download(url: str, path: Path) -> None:
    received = 0
    with (
        urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer,
        open(path, "wb") as opened,
    ):
        while piece := answer.read(PIECE_BYTES):
            opened.write(piece)
            received += len(piece)
        expected = answer.headers.get("Content-Length")
    if expected is not None and received != int(expected):
        raise OSError(f"{received} of {expected} bytes arrived")
