"""A store as somebody else adds one: this class, and a row of `store.kinds.KINDS`."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from store.errors import NoFile
from store.files import Files

PREFIX = "plain://"


class PlainFolder(Files):
    """A folder, by the five methods that a store of files needs."""

    def __init__(self, url: str, timeout: float) -> None:
        super().__init__(timeout)
        self.url = self.name = url
        self.key, self.root = f"hub.url={url}", Path(url.removeprefix(PREFIX))

    def create(self, private: bool) -> None:
        self.root.mkdir(exist_ok=True)

    def list_files(self) -> dict[str, int]:
        files = [path for path in self.root.rglob("*") if path.is_file()]
        return {path.relative_to(self.root).as_posix(): path.stat().st_size for path in files}

    def read_bytes(self, path: str, start: int, end: int) -> bytes:
        return (self.root / path).read_bytes()[start:end]

    def write(self, path: str, source: BinaryIO) -> str:
        content, target = source.read(), self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".partial-{os.getpid()}")
        part.write_bytes(content)
        part.replace(target)
        return hashlib.sha256(content).hexdigest()

    def delete(self, path: str) -> None:
        try:
            (self.root / path).unlink()
        except FileNotFoundError as error:
            raise NoFile(f"{path} is gone") from error
