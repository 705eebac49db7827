"""gRPC calls, byte by byte, of a caller that gives their answers no room."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from raw_client import WAIT_S

from ep_runtime import wire

_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return (
        struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body
    )


def _header(name: str, value: str) -> bytes:
    """Encodes a header in HPACK, without tables and without Huffman codes."""
    assert max(len(name), len(value)) < 127
    return b"".join([b"\0", *(bytes([len(text)]) + text.encode() for text in (name, value))])


class UnreadCalls:
    """A connection to api.sock whose streams have a window of no bytes."""

    def __init__(self, directory: Path) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(WAIT_S)
        self._connection.connect(str(directory / wire.API_SOCKET))
        settings = _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0))
        self._connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        self._stream = -1

    def send(self, method: str, request: bytes = b"", metadata=()) -> None:
        self._stream += 2
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
            "grpc-timeout": "60S",
            **dict(metadata),
        }
        block = b"".join(_header(*header) for header in headers.items())
        body = b"\0" + struct.pack(">I", len(request)) + request
        self._connection.sendall(
            _frame(_HEADERS, _END_HEADERS, self._stream, block)
            + _frame(_DATA, _END_STREAM, self._stream, body)
        )

    def __enter__(self) -> UnreadCalls:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
