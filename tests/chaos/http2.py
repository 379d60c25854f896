"""What passes on a gRPC connection, as far as a fault has to know it: whole frames, and the call that each belongs to.

Reads HTTP/2 framing (RFC 9113) and as much of HPACK (RFC 7541) as gRPC's own encoder uses: it writes no Huffman strings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
DATA, HEADERS = 0, 1
_END_HEADERS, _PADDED, _PRIORITY = 0x4, 0x8, 0x20
_NUM_STATIC = 61
_PATHS = (4, 5)
"""Entries of the static table whose name is `:path`."""


@dataclass(slots=True)
class Frame:
    header: bytes
    payload: bytearray
    """May be changed before the frame is passed on."""
    is_request: bool
    """From the client to the server."""
    call: str = ""
    """The method, `CommitWeights`; empty for what belongs to the connection."""

    @property
    def kind(self) -> int:
        return self.header[3]

    @property
    def flags(self) -> int:
        return self.header[4]

    @property
    def stream(self) -> int:
        return int.from_bytes(self.header[5:9]) & 0x7FFFFFFF

    @property
    def wire(self) -> bytes:
        return self.header + bytes(self.payload)


@dataclass(slots=True)
class FrameReader:
    """One direction of a connection: bytes in, whole frames out."""

    is_request: bool
    _buffer: bytearray = field(default_factory=bytearray)
    _is_begun: bool = False

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._buffer += data
        if self.is_request and not self._is_begun:
            if len(self._buffer) < len(PREFACE):
                return
            assert self._buffer.startswith(PREFACE), "not HTTP/2"
            yield Frame(bytes(PREFACE[:HEADER_BYTES]), self._buffer[HEADER_BYTES : len(PREFACE)], True)
            del self._buffer[: len(PREFACE)]
        self._is_begun = True
        while len(self._buffer) >= HEADER_BYTES:
            end = HEADER_BYTES + int.from_bytes(self._buffer[:3])
            if len(self._buffer) < end:
                return
            yield Frame(bytes(self._buffer[:HEADER_BYTES]), self._buffer[HEADER_BYTES:end], self.is_request)
            del self._buffer[:end]


@dataclass(slots=True)
class Calls:
    """Which stream of a connection is which call. Frames of the client's come in order, before the server's answers."""

    _by_stream: dict[int, str] = field(default_factory=dict)
    _table: list[tuple[bytes, bytes]] = field(default_factory=list)
    """HPACK's dynamic table, newest first. Never shortened: indices count from the newest."""

    def name(self, frame: Frame) -> None:
        """Fills `frame.call`."""
        if frame.is_request and frame.kind == HEADERS and frame.stream not in self._by_stream:
            assert frame.flags & (_END_HEADERS | _PADDED | _PRIORITY) == _END_HEADERS, "headers in several parts"
            path = dict(self._fields(bytes(frame.payload)))[b":path"]
            self._by_stream[frame.stream] = path.decode().rpartition("/")[2]
        if frame.kind in (DATA, HEADERS):
            frame.call = self._by_stream.get(frame.stream, "")

    def _fields(self, block: bytes) -> Iterator[tuple[bytes, bytes]]:
        at = 0
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _integer(block, at, 7)
                yield self._entry(index)
            elif first & 0xE0 == 0x20:
                _, at = _integer(block, at, 5)
            else:
                is_indexed = bool(first & 0x40)
                index, at = _integer(block, at, 6 if is_indexed else 4)
                if index:
                    name = self._entry(index)[0]
                else:
                    name, at = _string(block, at)
                value, at = _string(block, at)
                if is_indexed:
                    self._table.insert(0, (name, value))
                yield name, value

    def _entry(self, index: int) -> tuple[bytes, bytes]:
        if index <= _NUM_STATIC:
            return (b":path" if index in _PATHS else b"static-%d" % index), b""
        return self._table[index - _NUM_STATIC - 1]


def _integer(data: bytes, at: int, bits: int) -> tuple[int, int]:
    """A prefixed integer, and where it ends."""
    limit = (1 << bits) - 1
    value, at, shift = data[at] & limit, at + 1, 0
    if value < limit:
        return value, at
    while True:
        byte, at = data[at], at + 1
        value += (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _string(data: bytes, at: int) -> tuple[bytes, int]:
    assert not data[at] & 0x80, "a Huffman string"
    length, at = _integer(data, at, 7)
    return data[at : at + length], at + length
