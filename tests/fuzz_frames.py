"""Sends odd bytes to ports that speak HTTP/2 and TLS: hand-written frames, changed hellos."""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from fuzz_messages import OddMessages, every_method
from fuzzing import Answers
from raw_client import WAIT_S, Client

from ep_runtime import wire

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, _, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(
    10
)
END_STREAM, END_HEADERS = 1, 4
_STREAMS = [0, 1, 1, 3, 3, 5, 7, 2, 4, 101, (1 << 31) - 1, 1 << 31]
_WORDS = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 16384, 65535]
# Silent connections at a time; the daemon allows some hundred per user.
HELD_OPEN = 20
STAYS_S = 0.02  # longer than an answer takes


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return (
        struct.pack(">I", size & 0xFFFFFF)[1:] + struct.pack(">BBI", kind, flags, stream) + payload
    )


def _text(data: bytes) -> bytes:
    """Encodes an uncompressed string in HPACK."""
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, encoded = len(data) - 127, bytearray([127])
    while rest >= 128:
        encoded.append(rest % 128 + 128)
        rest //= 128
    return bytes([*encoded, rest]) + data


def header_block(headers: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)


class Frames:
    """Makes frames of right calls and of wrong ones."""

    def __init__(self, numbers: random.Random, token: str) -> None:
        self._numbers, self._token = numbers, token
        self._odd = OddMessages(numbers)
        self._methods = every_method()
        self._stream = 1
        self._chosen: list[Callable[[], bytes]] = []
        self._kinds: list[Callable[[], bytes]] = [
            self._odd_headers,
            self._flood,
            self._random,
            self._random,
            self._settings,
            self._of_word,
            lambda: frame(PING, numbers.choice([0, 1]), 0, numbers.randbytes(8)),
            lambda: frame(GOAWAY, 0, 0, numbers.randbytes(8)),
        ]

    def begin(self) -> bytes:
        """Usually starts a connection right; then sends only a few kinds, so that one that ends the
        connection does not hide the others.
        """
        self._stream = 1
        self._chosen = self._numbers.sample(self._kinds, self._numbers.choice([0, 1, 2, 5]))
        chance = self._numbers.random()
        if chance < 0.05:
            return self._numbers.randbytes(100)
        if chance < 0.08:
            return b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        if chance < 0.11:
            return PREFACE[: self._numbers.randrange(len(PREFACE))]
        return PREFACE + frame(SETTINGS, 0, 0, b"")

    def next(self) -> bytes:
        made = self._numbers.choice([self._call, *self._chosen])()
        if self._numbers.random() < 0.02:
            return self._odd.spoilt(made)
        return made

    def _headers(self) -> list[tuple[bytes, bytes]]:
        numbers = self._numbers
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", numbers.choice(self._methods).path.encode()),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"grpc-timeout", b"100m"),
            (wire.TOKEN_KEY.encode(), self._token.encode()),
        ]
        for _ in range(numbers.choice([0, 0, 1, 3])):
            place, raw = numbers.randrange(len(headers)), numbers.randbytes(numbers.choice([1, 9]))
            name, value = headers[place]
            changed = [(name, raw), (name, b""), (raw, value), (name, b"x" * 9000), (b"", b"")]
            headers[place : place + numbers.randrange(2)] = [numbers.choice(changed)]
        return headers

    def _next_stream(self) -> int:
        self._stream += 2
        return self._stream - 2

    def _call(self) -> bytes:
        """Makes frames with headers and a message."""
        stream, method = self._next_stream(), self._numbers.choice(self._methods)
        data = self._odd.encoded(method.request)[:16_000]
        said = self._numbers.choice([len(data), len(data), 0, len(data) + 1, 0xFFFFFFFF])
        message = struct.pack(">BI", self._numbers.choice([0, 0, 0, 1, 255]), said) + data
        return frame(HEADERS, END_HEADERS, stream, header_block(self._headers())) + frame(
            DATA, END_STREAM, stream, message
        )

    def _odd_headers(self) -> bytes:
        """Makes a header block that is malformed, split, or on the wrong stream."""
        numbers = self._numbers
        block = numbers.choice(
            [header_block(self._headers()), numbers.randbytes(50), b"\x3f\xff" * 9]
        )
        block = self._odd.spoilt(block) if numbers.random() < 0.7 else block
        stream = self._next_stream() if numbers.random() < 0.7 else numbers.choice(_STREAMS)
        return frame(HEADERS, numbers.choice([0, 1, 4, 5, 0x2C, 0xFF]), stream, block[:16_000])

    def _flood(self) -> bytes:
        """Makes many frames of a kind that costs the sender nothing."""
        stream, count = self._next_stream(), self._numbers.choice([10, 100, 400])
        opened = frame(HEADERS, END_HEADERS, stream, header_block(self._headers()))
        more = frame(CONTINUATION, 0, stream, header_block([(b"a", b"b")] * 9))
        return self._numbers.choice(
            [
                frame(HEADERS, 0, stream, b"") + more * count,
                (opened + frame(RST_STREAM, 0, stream, b"\0\0\0\x08")),
                opened + frame(DATA, 0, stream, b"") * count,
                frame(PING, 0, 0, b"12345678") * count,
                frame(SETTINGS, 0, 0, b"") * count,
                frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * count,
                frame(PRIORITY, 0, stream, struct.pack(">IB", stream, 255)) * count,
            ]
        )

    def _settings(self) -> bytes:
        numbers = self._numbers
        names = [0, 1, 2, 3, 4, 5, 6, 8, 0xFFFF]
        pairs = [
            struct.pack(">HI", numbers.choice(names), numbers.choice(_WORDS))
            for _ in range(numbers.choice([1, 2, 6, 2000]))
        ]
        return frame(SETTINGS, numbers.choice([0, 0, 1]), 0, b"".join(pairs))

    def _of_word(self) -> bytes:
        numbers = self._numbers
        kind = numbers.choice([WINDOW_UPDATE, RST_STREAM, PRIORITY])
        payload = struct.pack(">I", numbers.choice(_WORDS)) + (b"\0" if kind == PRIORITY else b"")
        return frame(kind, 0, numbers.choice(_STREAMS), payload)

    def _random(self) -> bytes:
        numbers = self._numbers
        payload = numbers.randbytes(numbers.choice([0, 1, 4, 5, 8, 100, 5000]))
        length = numbers.choice([None, None, None, 0, 16_384, 16_385, (1 << 24) - 1])
        kind = numbers.choice([*range(10), 11, 255])
        return frame(kind, numbers.randrange(256), numbers.choice(_STREAMS), payload, length)


class Connections:
    """Sends, reads what has arrived, and leaves: at once, cleanly, or after a while."""

    def __init__(self, connect: Callable[[], socket.socket], numbers: random.Random) -> None:
        self._connect, self._numbers = connect, numbers
        self._held: collections.deque[socket.socket] = collections.deque()
        self.answers: Answers = collections.Counter()

    def send(self, parts: Iterator[bytes]) -> int:
        """Returns how many parts were sent before the other side closed the connection."""
        connection = self._connect()
        connection.settimeout(WAIT_S)
        sent = 0
        try:
            for part in parts:
                connection.sendall(part)
                sent += 1
                self._drain(connection)
        except TimeoutError:
            raise AssertionError(f"{WAIT_S} s nothing was read of {part.hex():.2000}") from None
        except OSError as error:
            self.answers[type(error).__name__] += 1
        self._leave(connection)
        return max(sent, 1)

    def _drain(self, connection: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
            connection.setblocking(False)
            while answer := connection.recv(1 << 16):
                self.answers["answered"] += 1
                del answer
        connection.settimeout(WAIT_S)

    def _leave(self, connection: socket.socket) -> None:
        way = self._numbers.randrange(10)
        if way == 0:
            self._held.append(connection)
            if len(self._held) > HELD_OPEN:
                self._held.popleft().close()
            return
        if way < 4:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        elif way < 6:
            with contextlib.suppress(OSError):
                connection.settimeout(STAYS_S)
                while connection.recv(1 << 16):
                    self.answers["read"] += 1
        connection.close()


def _send_frames(
    connect: Callable[[], socket.socket], token: str, numbers: random.Random, inputs: int
) -> Answers:
    frames, connections = Frames(numbers, token), Connections(connect, numbers)
    while inputs > 0:
        count = min(inputs, numbers.choice([1, 4, 16, 64]))
        parts = (frames.begin() if number == 0 else frames.next() for number in range(count))
        inputs -= connections.send(parts)
    return connections.answers


def _unix(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return connection


def fuzz_frames(directory: Path, numbers: random.Random, inputs: int) -> Answers:
    """Sends HTTP/2 to api.sock, with the token of a session."""
    token = Client(directory).token
    connect = functools.partial(_unix, directory / wire.API_SOCKET)
    return _send_frames(connect, token, numbers, inputs)


def _tls(address: str, context: ssl.SSLContext) -> socket.socket:
    host, _, port = address.rpartition(":")
    plain = socket.create_connection((host, int(port)), WAIT_S)
    return context.wrap_socket(plain, server_hostname="a")


def _context(pki: Path, node: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(pki / "ca.pem"))
    context.set_alpn_protocols(["h2"])
    if node is not None:
        context.load_cert_chain(pki / f"{node}.pem", pki / f"{node}.key")
    return context


def fuzz_tls_frames(
    directory: Path, numbers: random.Random, inputs: int, *, address: str, pki: Path, node: str
) -> Answers:
    """Sends HTTP/2 to the cluster port inside TLS, with the certificate of `node`."""
    context = _context(pki, node)
    return _send_frames(lambda: _tls(address, context), "", numbers, inputs)


def _client_hello(context: ssl.SSLContext) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="a").do_handshake()
    return outgoing.read()


def fuzz_tls_bytes(
    directory: Path, numbers: random.Random, inputs: int, *, address: str, pki: Path
) -> Answers:
    """Sends hellos that are cut, changed or missing, each on a new connection to
    the cluster port.
    """
    host, _, port = address.rpartition(":")
    context, odd = _context(pki, None), OddMessages(numbers)
    hello = _client_hello(context)

    def record() -> bytes:
        body = numbers.randbytes(numbers.choice([0, 1, 40, 4000]))
        kind, size = (
            numbers.choice([20, 21, 22, 23, 24, 255]),
            numbers.choice([len(body), 0, 65535]),
        )
        return struct.pack(">BHH", kind, numbers.choice([0x301, 0x303, 0x304, 0]), size) + body

    kinds: list[Callable[[], bytes]] = [
        lambda: hello[: numbers.randrange(len(hello) + 1)],
        lambda: odd.spoilt(hello),
        lambda: odd.spoilt(hello),
        lambda: hello + record(),
        lambda: hello + hello,
        record,
        lambda: PREFACE + frame(SETTINGS, 0, 0, b""),
        lambda: b"GET / HTTP/1.1\r\n\r\n",
        lambda: numbers.randbytes(200),
    ]
    connections = Connections(lambda: socket.create_connection((host, int(port)), WAIT_S), numbers)
    for _ in range(inputs):
        connections.send(iter([numbers.choice(kinds)()]))
    return connections.answers
