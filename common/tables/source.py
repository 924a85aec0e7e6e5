"""Bytes and text of an untrusted file: gzip and zstd by streaming, decoding, and a bound on what comes out."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from common.errors import FieldError, InvalidRequest, InvalidTable, MalformedBody
from common.tables.shape import MIB, TableLimits, check_bytes

CHUNK_BYTES = MIB
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
#: What `encoding` may be, by Python's own name for it.
ENCODINGS = {
    "utf-8": "utf-8-sig",
    "utf-8-sig": "utf-8-sig",
    "ascii": "utf-8-sig",
    "utf-16": "utf-16",
    "utf-16-le": "utf-16-le",
    "utf-16-be": "utf-16-be",
    "iso8859-1": "latin-1",
    "iso8859-15": "iso8859-15",
    "cp1252": "cp1252",
}
#: First bytes of what people send as CSV by mistake.
NOT_TEXT = {
    b"PK\x03\x04": "a zip archive or an Excel workbook",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook",
    b"%PDF": "a PDF",
}


def byte_chunks(path: Path, limits: TableLimits) -> Iterator[bytes]:
    """The file's content in pieces of at most 1 MiB, decompressed when it is gzip or zstd.

    Raises TooLarge once a compressed file gave more than `limits.max_bytes`, MalformedBody when it is damaged.
    """
    with path.open("rb") as plain:
        packed = compression(plain.peek(4))
        if packed is None:
            while data := plain.read(CHUNK_BYTES):
                yield data
            return
        size = 0
        source: Any = (
            gzip.GzipFile(fileobj=plain, mode="rb")
            if packed == "gzip"
            else pa.CompressedInputStream(plain, "zstd")
        )
        try:
            with source as unpacked:
                while data := unpacked.read(CHUNK_BYTES):
                    size += len(data)
                    check_bytes(size, limits)
                    yield data
        except (EOFError, zlib.error, OSError) as error:
            raise MalformedBody(f"The {packed} file is damaged: {error}.") from None


def compression(head: bytes) -> str | None:
    """`gzip` or `zstd` by a file's first bytes, None when it is neither."""
    if head.startswith(GZIP_MAGIC):
        return "gzip"
    return "zstd" if head.startswith(ZSTD_MAGIC) else None


def text_chunks(path: Path, limits: TableLimits, encoding: str | None = None) -> Iterator[str]:
    """The file's text in pieces, byte order mark removed, line ends as they are.

    Without `encoding`: UTF-16 when the file starts with its byte order mark or with one character of it, else
    UTF-8. Raises InvalidTable
    that names the line of the first byte that can't be decoded, InvalidRequest for an unknown encoding.
    """
    decoder: codecs.IncrementalDecoder | None = None
    codec, line = "", 1
    for data in byte_chunks(path, limits):
        if decoder is None:
            codec = _codec(data, encoding)
            decoder = codecs.getincrementaldecoder(codec)()
        text = _decoded(decoder, data, codec, line)
        if "\0" in text:
            at = line + text[: text.index("\0")].count("\n")
            raise InvalidTable(f"Line {at} holds a NUL byte: this is not a text file.")
        line += text.count("\n")
        yield text
    if decoder is not None:
        yield _decoded(decoder, b"", codec, line, final=True)


def _codec(head: bytes, encoding: str | None) -> str:
    for magic, what in NOT_TEXT.items():
        if head.startswith(magic):
            raise InvalidTable(f"The file is {what}, not CSV.")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if encoding is None and len(head) > 1 and (head[0] == 0) != (head[1] == 0):
        return "utf-16-be" if head[0] == 0 else "utf-16-le"
    if encoding is None or head.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    try:
        return ENCODINGS[codecs.lookup(encoding).name]
    except (LookupError, ValueError):
        known = "utf-8, utf-16, latin-1, iso-8859-15, cp1252"
        fault = FieldError("encoding", f"must be one of {known}")
        raise InvalidRequest(
            f"Unknown encoding {encoding[:40]!r}; known are {known}.", errors=[fault]
        ) from None


def _decoded(
    decoder: codecs.IncrementalDecoder, data: bytes, codec: str, line: int, final: bool = False
) -> str:
    try:
        return decoder.decode(data, final)
    except UnicodeDecodeError as error:
        good = error.object[: error.start].decode(error.encoding, errors="ignore")
        at = line + good.count("\n")
        bad = f"0x{error.object[error.start]:02x}"
        shown = "UTF-8" if codec.startswith("utf-8") else codec
        detail = (
            f"Line {at} is not valid {shown} (byte {bad}). Save the file as UTF-8, or name its encoding: "
            f'set `encoding` to "latin-1" for Western European text.'
        )
        fault = FieldError("encoding", f'line {at} is not valid {shown}; "latin-1" can be set')
        raise InvalidTable(detail, errors=[fault], line=at) from None
