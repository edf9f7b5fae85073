"""Xet, as the loopback Hub answers it: the storage to which the client uploads large files.

The client cuts a file into chunks, packs new chunks into xorbs, and uploads those; a shard then
says of which chunks of which xorbs a file consists. To download, it asks for a file's
reconstruction and reads ranges of xorbs: here each file is then one xorb, of chunks of our own.
Source: the specification at https://huggingface.co/docs/xet, and the requests of hf-xet 1.8. What a
newer server may do better is answered with 404, and the client does without: upload grants, shards
v2, reconstructions v2, deduplication between repos.
"""

from __future__ import annotations

import re
import secrets
import struct
import time
from collections.abc import Iterator

from loopback_repos import readable, signed, writable
from loopback_server import Answer, Call, Refusal, answers, json_answer
from loopback_store import BUCKETS, Bucket, Entry, Repo, sha256_of

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


class XetStore:
    """The xorbs and files of a hub."""

    def __init__(self) -> None:
        self.xorbs: dict[str, list[bytes]] = {}
        """The chunks of each."""
        self.files: dict[str, bytes] = {}
        self.hashes: dict[str, str] = {}
        """The Xet hash of a content, by its SHA-256."""
        self.tokens: dict[str, tuple[str, str]] = {}
        """What each may do, and in which repo or bucket."""

    def keep(self, file: str, content: bytes) -> str:
        """Keep a file by its Xet hash; its SHA-256."""
        sha256 = sha256_of(content)
        self.files[file], self.hashes[sha256] = content, file
        return sha256

    def forget(self, sha256: str) -> None:
        """Forget a file, if it was uploaded with Xet."""
        self.files.pop(self.hashes.pop(sha256, ""), None)

    def content(self, file: str) -> bytes:
        """A file by its Xet hash. Raises Refusal."""
        if file not in self.files:
            raise Refusal(404, f"There is no file {file}")
        return self.files[file]


def _chunks_of(xorb: bytes) -> Iterator[bytes]:
    """The chunks of a xorb. A footer, which only stored ones have, is no chunk."""
    at = 0
    while at < len(xorb) and not xorb.startswith(b"XETBLOB", at):
        _, stored, scheme, _ = CHUNK_HEADER.unpack_from(xorb, at)
        begin = at + CHUNK_HEADER.size
        at = begin + int.from_bytes(stored, "little")
        if scheme != PLAIN or at > len(xorb):
            raise Refusal(400, "A chunk is compressed, or cut off")
        yield xorb[begin:at]


def _xorb_of(content: bytes) -> bytes:
    """A file as one xorb."""
    chunks = [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
    lengths = [len(chunk).to_bytes(3, "little") for chunk in chunks]
    headers = [CHUNK_HEADER.pack(0, length, PLAIN, length) for length in lengths]
    return b"".join(part for pair in zip(headers, chunks, strict=True) for part in pair)


def _files_of(shard: bytes) -> Iterator[tuple[str, str | None, list[tuple[str, int, int]]]]:
    """The files of a shard: Xet hash, SHA-256, and xorb and range of chunks of each part."""
    whole = (len(shard) - SHARD_HEADER_BYTES) // RECORD.size * RECORD.size
    records = RECORD.iter_unpack(shard[SHARD_HEADER_BYTES : SHARD_HEADER_BYTES + whole])
    for name, flags, count, _, _ in records:
        if name == LAST:
            return
        parts = []
        for _ in range(count):
            xorb, _, _, start, end = next(records)
            parts.append((_hex_of(xorb), start, end))
        if flags & HAS_VERIFICATION:
            for _ in range(count):
                next(records)
        sha256 = _hex_of(next(records)[0]) if flags & HAS_SHA256 else None
        yield _hex_of(name), sha256, parts


def _hex_of(name: bytes) -> str:
    """A hash as it is written: four numbers of 8 bytes, each with its last byte first."""
    return "".join(name[at : at + 8][::-1].hex() for at in range(0, 32, 8))


@answers("xet-write-token", "GET", "/api/models/{repo}/xet-write-token/{revision}")
def _write_token(call: Call) -> Answer:
    return _token(call, writable(call), "write")


@answers("xet-read-token", "GET", "/api/models/{repo}/xet-read-token/{revision}")
def _read_token(call: Call) -> Answer:
    return _token(call, readable(call), "read")


@answers("xet-write-token", "GET", "/api/buckets/{repo}/xet-write-token")
def _bucket_write_token(call: Call) -> Answer:
    return _token(call, writable(call, BUCKETS + call.names["repo"]), "write")


@answers("xet-read-token", "GET", "/api/buckets/{repo}/xet-read-token")
def _bucket_read_token(call: Call) -> Answer:
    return _token(call, readable(call, BUCKETS + call.names["repo"]), "read")


def _token(call: Call, holder: Repo | Bucket, scope: str) -> Answer:
    token, expires = secrets.token_hex(16), int(time.time()) + 3600
    call.hub.xet.tokens[token] = scope, holder.id
    place = call.hub.contents_endpoint
    answer = json_answer({"accessToken": token, "exp": expires, "casUrl": place})
    answer.headers["X-Xet-Access-Token"] = token
    answer.headers["X-Xet-Token-Expiration"] = str(expires)
    answer.headers["X-Xet-Cas-Url"] = place
    return answer


def _holder(call: Call, scope: str) -> Repo | Bucket:
    """The repo or bucket of a request's token. Raises Refusal for one that is none."""
    token = call.headers.get("Authorization", "").removeprefix("Bearer ")
    if token not in call.hub.xet.tokens:
        raise Refusal(401, "The token is unknown")
    may, holder = call.hub.xet.tokens[token]
    if scope == "write" and may != "write":
        raise Refusal(403, "The token may only read")
    if (found := call.hub.repo(holder)) is None:
        raise Refusal(404, f"There is no {holder}")
    return found


@answers("xet-chunk", "GET", "/v1/chunks/{prefix}/{hash}")
def _chunk(call: Call) -> Answer:
    _holder(call, "read")
    raise Refusal(404, "Unknown chunk")


@answers("xorb", "POST", "/v1/xorbs/default/{hash}")
def _xorb(call: Call) -> Answer:
    _holder(call, "write")
    xorb, uploaded = call.names["hash"], call.hub.uploaded
    call.hub.xet.xorbs[xorb] = [*_chunks_of(call.body)]
    is_new = xorb not in uploaded
    if not is_new:  # until a shard has come, the client must take it for lost
        uploaded[xorb] += 1
    return json_answer({"was_inserted": is_new})


@answers("shard", "POST", "/v1/shards")
def _shard(call: Call) -> Answer:
    holder, xet = _holder(call, "write"), call.hub.xet
    for file, sha256, parts in _files_of(call.body):
        content = b""
        for xorb, start, end in parts:
            chunks = xet.xorbs.get(xorb, [])
            if end > len(chunks):
                raise Refusal(400, f"There is no chunk {end - 1} of {xorb}")
            content += b"".join(chunks[start:end])
            call.hub.uploaded.setdefault(xorb, 1)
        holder.receive(sha256 or sha256_of(content), content)  # a bucket's has no SHA-256
        xet.keep(file, content)
    return json_answer({"result": 1})


@answers("reconstruction", "GET", "/v1/reconstructions/{hash}")
def _reconstruction(call: Call) -> Answer:
    """The chunks that hold a file, or the range of it that the request asks for."""
    _holder(call, "read")
    file = call.names["hash"]
    size = len(call.hub.xet.content(file))
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", call.headers.get("Range", ""))
    start, end = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)
    if asked and start >= end:
        return Answer(416)
    first, last = start // CHUNK_BYTES, -(-end // CHUNK_BYTES)
    chunks = {"start": first, "end": last}
    length = min(last * CHUNK_BYTES, size) - first * CHUNK_BYTES
    stored = CHUNK_BYTES + CHUNK_HEADER.size
    place = {
        "range": chunks,
        "url": signed(call, "GET", f"/xorb/{file}"),
        "url_range": {
            "start": first * stored,
            "end": first * stored + length + (last - first) * CHUNK_HEADER.size - 1,
        },
    }
    return json_answer(
        {
            "offset_into_first_range": start - first * CHUNK_BYTES,
            "terms": [{"hash": file, "unpacked_length": length, "range": chunks}] if size else [],
            "fetch_info": {file: [place]} if size else {},
        }
    )


@answers("xorb-get", "GET", "/xorb/{hash}")
def _xorb_get(call: Call) -> Answer:
    if call.query.get("signature") != [call.hub.signature(call.method, call.path)]:
        raise Refusal(403, "The signature does not match")
    xorb = _xorb_of(call.hub.xet.content(call.names["hash"]))
    start, end = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", call.headers["Range"]).groups())
    headers = {"Content-Range": f"bytes {start}-{end}/{len(xorb)}"}
    return Answer(206, xorb[start : end + 1], headers)


@answers("xet-telemetry", "POST", "/v1/telemetry")
def _telemetry(call: Call) -> Answer:
    return json_answer({})


def headers_of(call: Call, repo: Repo, revision: str, entry: Entry) -> dict[str, str]:
    """What tells a client, in the answer for a large file, where Xet has it."""
    found = call.hub.xet.hashes.get(entry.sha256)
    if found is None:
        return {}
    place = f"{call.hub.endpoint}/api/models/{repo.id}/xet-read-token/{revision}"
    return {"X-Xet-Hash": found, "Link": f'<{place}>; rel="xet-auth"'}
