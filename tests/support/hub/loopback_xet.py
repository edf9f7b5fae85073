"""Xet, as the loopback Hub answers it: the storage to which the client uploads large files.

The client cuts a file into chunks, packs new chunks into xorbs, and uploads those; a shard then
says of which chunks of which xorbs a file consists. To download, it asks for a file's
reconstruction and reads those ranges. Source: the specification at https://huggingface.co/docs/xet,
and the requests of hf-xet 1.8. What a newer server may do better is answered with 404, and the
client does without: upload grants, shards v2, reconstructions v2, deduplication between repos.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loopback_repos import commit_meant, readable, writable
from loopback_server import Answer, Call, Refusal, Stretch, answers, json_answer
from loopback_store import BUCKETS, Bucket, Entry, Repo

CHUNK_HEADER = struct.Struct("<B3sB3s")
"""Version, length as stored, compression scheme, length."""
CHUNK_BYTES = 64 << 10
SHARD_HEADER_BYTES = 48
RECORD = struct.Struct("<32sIIII")
"""Each record of a shard: a hash and four numbers, whose meaning depends on the kind."""
LAST = b"\xff" * 32
"""The hash of the record that ends a section."""
HAS_VERIFICATION, HAS_SHA256 = 1 << 31, 1 << 30
PLAIN = 0
"""The compression scheme of all chunks: `LoopbackHub.environment` has the client compress none."""


@dataclass(frozen=True)
class Term:
    """A part of a file: chunks `start` to `end` of a xorb."""

    xorb: str
    start: int
    end: int
    size: int
    """Bytes of the file."""


class XetStore:
    """The xorbs and files of a hub. Every method may be called from several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._ends: dict[str, list[int]] = {}
        """Where each chunk of a xorb ends, by the xorb's hash."""
        self._named: set[str] = set()
        """The xorbs of which some shard has said what they hold."""
        self._files: dict[str, list[Term]] = {}
        self._hashes: dict[str, str] = {}
        """The Xet hash of a content, by its SHA-256."""

    def hash_of(self, sha256: str) -> str | None:
        """The Xet hash of a content; None where it was not uploaded with Xet."""
        with self._lock:
            return self._hashes.get(sha256)

    def terms(self, file: str) -> list[Term]:
        """What a file consists of. Raises Refusal."""
        with self._lock:
            if file not in self._files:
                raise Refusal(404, f"There is no file {file}")
            return self._files[file]

    def path(self, xorb: str) -> Path:
        """Where a xorb lies."""
        return self._folder / xorb

    def forget(self, sha256: str) -> None:
        """Forget a file, if it was uploaded with Xet."""
        with self._lock:
            file = self._hashes.pop(sha256, None)
            self._files.pop(file or "", None)

    def receive(self, xorb: str, blocks: Iterable[bytes]) -> bool:
        """Keep a xorb; False where a shard has named it before."""
        partial = self._folder / uuid.uuid4().hex
        try:
            with partial.open("wb") as file:
                file.writelines(blocks)
            ends = _chunk_ends(partial.read_bytes())
            with self._lock:
                is_new = xorb not in self._named
                partial.replace(self.path(xorb))
                self._ends[xorb] = ends
        finally:
            partial.unlink(missing_ok=True)
        return is_new

    def keep(self, sha256: str, content: bytes) -> None:
        """Keep a content that no client has uploaded, as a file of one xorb with its SHA-256."""
        chunks = [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
        lengths = [len(chunk).to_bytes(3, "little") for chunk in chunks]
        headers = [CHUNK_HEADER.pack(0, length, PLAIN, length) for length in lengths]
        self.receive(sha256, (part for pair in zip(headers, chunks, strict=True) for part in pair))
        with self._lock:
            self._files[sha256] = [Term(sha256, 0, len(chunks), len(content))]
            self._hashes[sha256] = sha256

    def sha256_of(self, file: str) -> str | None:
        """The SHA-256 of a file, by its Xet hash; None where it was not uploaded."""
        with self._lock:
            return next((one for one, found in self._hashes.items() if found == file), None)

    def register(self, shard: bytes, repo: Repo | Bucket) -> set[str]:
        """Note the files of a shard, whose contents the repo has then; the xorbs new to it.

        Raises Refusal.
        """
        new: set[str] = set()
        for file, sha256, terms in _files_of(shard):
            for term in terms:
                with self._lock:
                    if term.end > len(self._ends.get(term.xorb, [])):
                        raise Refusal(400, f"There is no chunk {term.end - 1} of {term.xorb}")
            if sha256 is None:
                if not isinstance(repo, Bucket):
                    raise Refusal(400, "A file without its SHA-256 cannot be committed here")
                content = b"".join(part for term in terms for part in self._chunks(term))
                sha256 = hashlib.sha256(content).hexdigest()
            repo.contents.receive(sha256, (part for term in terms for part in self._chunks(term)))
            with self._lock:
                self._files[file], self._hashes[sha256] = terms, file
                new |= {term.xorb for term in terms} - self._named
                self._named |= new
        return new

    def stretch(self, term: Term) -> tuple[int, int]:
        """The bytes of a xorb that a term needs, from and to."""
        with self._lock:
            starts = [0, *self._ends[term.xorb]]
        return starts[term.start], starts[term.end]

    def _chunks(self, term: Term) -> Iterator[bytes]:
        start, end = self.stretch(term)
        with self.path(term.xorb).open("rb") as file:
            file.seek(start)
            stored = file.read(end - start)
        at, size = 0, 0
        while at < len(stored):
            _, stored_length, scheme, _ = CHUNK_HEADER.unpack_from(stored, at)
            begin = at + CHUNK_HEADER.size
            length = int.from_bytes(stored_length, "little")
            at = begin + length
            if scheme != PLAIN:
                raise Refusal(400, f"There is no compression scheme {scheme}")
            size += length
            yield stored[begin:at]
        if size != term.size:
            raise Refusal(400, f"A term of {term.xorb} has {size} bytes, not {term.size}")


def _chunk_ends(xorb: bytes) -> list[int]:
    """Where each chunk of a xorb ends. A footer, which only stored ones have, is no chunk."""
    ends, at = [], 0
    while at < len(xorb) and not xorb.startswith(b"XETBLOB", at):
        if at + CHUNK_HEADER.size > len(xorb):
            raise Refusal(400, "A xorb ends within a chunk")
        _, length, _, _ = CHUNK_HEADER.unpack_from(xorb, at)
        at += CHUNK_HEADER.size + int.from_bytes(length, "little")
        ends.append(at)
    if at > len(xorb):
        raise Refusal(400, "A xorb ends within a chunk")
    return ends


def _files_of(shard: bytes) -> Iterator[tuple[str, str | None, list[Term]]]:
    """The files of a shard: Xet hash, SHA-256 and terms of each. A bucket needs no SHA-256."""
    records = RECORD.iter_unpack(
        shard[SHARD_HEADER_BYTES : len(shard) - (len(shard) - SHARD_HEADER_BYTES) % RECORD.size]
    )
    for name, flags, count, _, _ in records:
        if name == LAST:
            return
        terms = []
        for _ in range(count):
            xorb, _, size, start, end = next(records)
            terms.append(Term(hex_of(xorb), start, end, size))
        if flags & HAS_VERIFICATION:
            for _ in range(count):
                next(records)
        sha256 = hex_of(next(records)[0]) if flags & HAS_SHA256 else None
        yield hex_of(name), sha256, terms


def hex_of(name: bytes) -> str:
    """A hash as it is written: four numbers of 8 bytes, each with its last byte first."""
    return "".join(name[at : at + 8][::-1].hex() for at in range(0, 32, 8))


@answers("xet-write-token", "GET", "/api/models/{repo}/xet-write-token/{revision}")
def _write_token(call: Call) -> Answer:
    repo, _ = writable(call)
    commit_meant(call, repo)
    return _token(call, repo, "write")


@answers("xet-read-token", "GET", "/api/models/{repo}/xet-read-token/{revision}")
def _read_token(call: Call) -> Answer:
    repo = readable(call)
    commit_meant(call, repo)
    return _token(call, repo, "read")


@answers("xet-write-token", "GET", "/api/buckets/{repo}/xet-write-token")
def _bucket_write_token(call: Call) -> Answer:
    return _token(call, writable(call, BUCKETS + call.names["repo"])[0], "write")


@answers("xet-read-token", "GET", "/api/buckets/{repo}/xet-read-token")
def _bucket_read_token(call: Call) -> Answer:
    return _token(call, readable(call, BUCKETS + call.names["repo"]), "read")


def _token(call: Call, holder: Repo | Bucket, scope: str) -> Answer:
    hub = call.hub
    expires = int(time.time() + hub.xet_token_seconds)
    content = f"{scope}:{expires}:{holder.id}"
    token, place = f"{content}:{hub.signature(scope, content)}", hub.contents_endpoint
    answer = json_answer({"accessToken": token, "exp": expires, "casUrl": place})
    answer.headers["X-Xet-Access-Token"] = token
    answer.headers["X-Xet-Token-Expiration"] = str(expires)
    answer.headers["X-Xet-Cas-Url"] = place
    return answer


def _holder(call: Call, scope: str) -> Repo | Bucket:
    """The repo or bucket of a request's token. Raises Refusal for one that is none, or expired."""
    token = call.headers.get("Authorization", "").removeprefix("Bearer ")
    match = re.fullmatch(r"((read|write):(\d+):([^:]+)):(\w+)", token)
    if match is None or not hmac.compare_digest(call.hub.signature(match[2], match[1]), match[5]):
        raise Refusal(401, "Invalid token")
    if int(match[3]) <= time.time():
        raise Refusal(401, "The token has expired")
    if scope == "write" and match[2] != scope:
        raise Refusal(403, "The token may only read")
    holder: Repo | Bucket | None = call.hub.repo(match[4])
    if holder is None:
        raise Refusal(404, f"There is no {match[4]}")
    return holder


@answers("xet-chunk", "GET", "/v1/chunks/{prefix}/{hash}")
def _chunk(call: Call) -> Answer:
    _holder(call, "read")
    raise Refusal(404, "Unknown chunk")


@answers("xorb", "POST", "/v1/xorbs/default/{hash}")
def _xorb(call: Call) -> Answer:
    _holder(call, "write")
    xorb = call.names["hash"]
    is_new = call.hub.xet.receive(xorb, call.body.blocks())
    if not is_new:  # until a shard has come, the client must take it for lost
        call.hub.received(xorb)
    return json_answer({"was_inserted": is_new})


@answers("shard", "POST", "/v1/shards")
def _shard(call: Call) -> Answer:
    for xorb in call.hub.xet.register(call.body.read(), _holder(call, "write")):
        call.hub.received(xorb)
    return json_answer({"result": 1})


@answers("reconstruction", "GET", "/v1/reconstructions/{hash}")
def _reconstruction(call: Call) -> Answer:
    _holder(call, "read")
    terms = call.hub.xet.terms(call.names["hash"])
    offset, asked = 0, re.fullmatch(r"bytes=(\d+)-(\d+)", call.headers.get("Range", ""))
    if asked is not None:
        terms, offset = _within(terms, int(asked[1]), int(asked[2]) + 1)
        if not terms:
            return Answer(416)
    places: dict[str, list[dict[str, object]]] = {}
    for term in terms:
        start, end = call.hub.xet.stretch(term)
        places.setdefault(term.xorb, []).append(
            {
                "range": {"start": term.start, "end": term.end},
                "url": call.hub.signed("GET", f"/xorb/{term.xorb}"),
                "url_range": {"start": start, "end": end - 1},
            }
        )
    described = [
        {
            "hash": term.xorb,
            "unpacked_length": term.size,
            "range": {"start": term.start, "end": term.end},
        }
        for term in terms
    ]
    return json_answer(
        {"offset_into_first_range": offset, "terms": described, "fetch_info": places}
    )


def _within(terms: list[Term], start: int, end: int) -> tuple[list[Term], int]:
    """The terms that hold some bytes of a file, and how far into the first they begin."""
    found, offset, at = [], 0, 0
    for term in terms:
        if at < end and at + term.size > start:
            offset = offset if found else start - at
            found.append(term)
        at += term.size
    return found, offset


@answers("xorb-get", "GET", "/xorb/{hash}")
def _xorb_get(call: Call) -> Answer:
    if call.query.get("signature") != [call.hub.signature(call.method, call.path)]:
        raise Refusal(403, "The signature does not match")
    path = call.hub.xet.path(call.names["hash"])
    start, end = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", call.headers["Range"]).groups())
    headers = {"Content-Range": f"bytes {start}-{end}/{path.stat().st_size}"}
    return Answer(206, Stretch(path, start, end + 1 - start), headers)


@answers("xet-telemetry", "POST", "/v1/telemetry")
def _telemetry(call: Call) -> Answer:
    return json_answer({})


def headers_of(call: Call, repo: Repo, revision: str, entry: Entry) -> dict[str, str]:
    """What tells a client, in the answer for a large file, where Xet has it."""
    found = call.hub.xet.hash_of(entry.sha256)
    if found is None:
        return {}
    place = f"{call.hub.endpoint}/api/models/{repo.id}/xet-read-token/{revision}"
    return {"X-Xet-Hash": found, "Link": f'<{place}>; rel="xet-auth"'}
