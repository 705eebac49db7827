"""An append-only file of facts, which a killed daemon leaves to the next one.

A fact is a key with a JSON value. The last record of a key counts, and a record without a value
deletes the key. The file has a magic number and then records {length u32, crc32 u32, sequence u64,
payload}; reading stops at the first incomplete record. The daemon allocates space for the next
records ahead, so that it notices a full disk before it answers a call.

When the file is long, a new file of only the current facts replaces it. If the disk cannot hold
both, the daemon moves records to a second file, PATH.part, and cuts the moved end off the old file.
Before each cut it writes a note to the second file, under the key "", with the old file's new end.
A daemon that finds both files reads the old one and then the second. It deletes the second file if
none of its notes names the old file's end.

The daemon's own journal is not synced to the disk, because a crash of the host also ends the
processes and memory that its facts are about. A killed daemon loses nothing that `write` accepted.
The cluster's journal is synced before an answer to another host, which survives this host's crash.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ep_runtime import files
from ep_runtime.errors import PoolExhaustedError
from ep_runtime.text import iec
from ep_runtime_server.base.failpoints import Failpoints

MAGIC = b"EPRTJ001"
RESERVE_BYTES = 256 << 10
MAX_RECORD_BYTES = 64 << 20
COMPACT_AT_BYTES = 1 << 20
COMPACT_AT_GROWTH = 4

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOTE = ""  # key of notes; no fact uses it
_SPARE_BYTES = 4096  # space kept in a second file for its next note

_HEAD = struct.Struct("<IIQ")  # length of the payload, crc of sequence and payload, sequence

Record = tuple[str, Any]  # key, and value or its Encoded; None deletes the key


class Encoded(NamedTuple):
    """A value that is already encoded as JSON."""

    text: bytes


def encoded(value: Any) -> Encoded | None:
    """Encodes a value as JSON; None stays None."""
    return Encoded(json.dumps(value, separators=(",", ":")).encode()) if value is not None else None


def _crc(sequence: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(sequence.to_bytes(8, "little")))


def _payload(record: Record) -> bytes:
    key, value = record
    text = value if isinstance(value, Encoded) else encoded(value)
    return b"[%s,%s]" % (json.dumps(key).encode(), text.text if text is not None else b"null")


def _key_of(payload: bytes) -> str | None:
    """Returns the key of a record's payload; None if the payload is malformed."""
    try:
        key, _ = json.loads(payload)
    except (ValueError, TypeError, RecursionError):
        return None
    return key if isinstance(key, str) else None


def _mark(end: int, payload: bytes) -> list[int]:
    """Makes the mark of a file: its last record's end and checksum."""
    return [end, zlib.crc32(payload)]


def _encode(sequence: int, record: Record | bytes) -> bytes:
    """Encodes a record, or the payload of one, with its sequence number and checksum."""
    payload = record if isinstance(record, bytes) else _payload(record)
    return _HEAD.pack(len(payload), _crc(sequence, payload), sequence) + payload


def whole_records(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yields (payload, end) of each record of a journal, up to the first incomplete one."""
    if file.read(len(MAGIC)) != MAGIC:
        return
    end = len(MAGIC)
    for number in itertools.count(1):
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return
        length, crc, sequence = _HEAD.unpack(head)
        if not 0 < length <= MAX_RECORD_BYTES or sequence != number:
            return
        payload = file.read(length)
        if len(payload) < length or _crc(sequence, payload) != crc:
            return
        end += _HEAD.size + length
        yield payload, end


def _last_records(fd: int) -> tuple[dict[str, tuple[int, bytes]], int, int]:
    """Returns {key: (end, payload) of its last record}, the number of records, and their end."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        records = [(_key_of(payload), end, payload) for payload, end in whole_records(file)]
    found = {key: (end, payload) for key, end, payload in records if key is not None}
    return found, len(records), records[-1][1] if records else 0


def cut_bytes(file: BinaryIO, end: int) -> int:
    """Returns how many bytes of an incomplete record follow `end`; 0 if only zeros follow.

    Reads at most MAX_RECORD_BYTES, because another program may have written a larger file.
    """
    try:
        start = os.lseek(file.fileno(), end, os.SEEK_DATA)  # skips a hole of any size
    except OSError:  # only a hole follows
        return 0
    file.seek(start)
    found = len(file.read(MAX_RECORD_BYTES).rstrip(b"\0"))
    return start - end + found if found else 0


def _write_all(fd: int, data: bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def under(facts: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns the facts whose keys begin with `prefix`, by the rest of their keys."""
    return {k.removeprefix(prefix): v for k, v in facts.items() if k.startswith(prefix)}


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Journal:
    """The journal of one directory; the directory's lock allows one process at a time.

    Attributes:
        was_there: whether the file existed.
        cut_bytes: bytes of an incomplete record at the end; 0 for a clean end.
        odd_records: how many complete records are not a key with a value; they are ignored.
        error: why the last write failed; empty if the file has everything.
    """

    def __init__(
        self, path: Path, failpoints: Failpoints, *, name: str = "journal", synced: bool = False
    ) -> None:
        """Opens and reads the file, or creates it. Raises PoolExhaustedError on failure.

        Args:
            name: prefix of the names of its failpoints.
            synced: sync each new file to the disk; call `begin_sync` to sync appended records.
        """
        self._path = path
        self._part = path.with_name(f"{path.name}.part")
        self._split = False  # the old file was cut, so the second one is needed
        self._failpoints = failpoints
        self._name = name
        self._synced = synced
        self._fd = -1
        self._sequence = 0
        self._end = 0  # end of the last record
        self._allocated = 0
        self._compacted_bytes = 0
        self._lost = False  # a sync failed, so appended records may be missing
        self._facts: dict[str, Any] = {}
        self.was_there = False
        self.cut_bytes = 0
        self.odd_records = 0
        self.error = ""
        try:
            self._fd = files.open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            self._read()
        except OSError as error:
            self.close()
            raise PoolExhaustedError(
                f"cannot use the journal {self._path}: {error.strerror}", path=str(self._path)
            ) from error

    @property
    def size_bytes(self) -> int:
        """Returns the size of the file's records in bytes."""
        return self._end

    def free_bytes(self) -> int:
        """Returns how many bytes the file system has free for the daemon. Raises OSError."""
        found = os.statvfs(self._path.parent)
        return found.f_bavail * found.f_frsize

    def _read(self) -> None:
        self.was_there = os.pread(self._fd, len(MAGIC), 0) == MAGIC
        good, payload = len(MAGIC) if self.was_there else 0, b""
        with open(self._fd, "rb", closefd=False) as file:
            for payload, end in whole_records(file):
                good = end
                self._sequence += 1
                self._take(payload)
            self.cut_bytes = cut_bytes(file, good)
        # Remove old bytes behind the end, so that they are not read as records after later appends.
        os.ftruncate(self._fd, good)
        self._end = self._allocated = good
        with contextlib.suppress(FileNotFoundError):
            self._read_part(_mark(good, payload))

    def _read_part(self, mark: list[int]) -> None:
        """Reads the second file if it continues the old one; else deletes it. Raises OSError."""
        with open(files.open_regular(self._part, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            payloads = [payload for payload, _ in whole_records(file)]
        if _payload((_NOTE, mark)) not in payloads:
            os.unlink(self._part)
            return
        for payload in payloads:
            self._take(payload)
        self._split, self.error = True, "it was written anew when its daemon ended"

    def _take(self, payload: bytes) -> None:
        key = _key_of(payload)
        if key is None:
            self.odd_records += 1
        if key is None or key == _NOTE:
            return
        self._facts.pop(key, None)
        if (value := json.loads(payload)[1]) is not None:
            self._facts[key] = value

    def take_facts(self) -> dict[str, Any]:
        """Returns the facts read at the start, and drops them to free their memory."""
        facts, self._facts = self._facts, {}
        return facts

    def admit(self, more_bytes: int = 0) -> None:
        """Reserves space for the next changes. Raises PoolExhaustedError if there is none."""
        wanted_bytes = RESERVE_BYTES // 4 + more_bytes
        if not self.error:
            try:
                self._reserve(wanted_bytes)
            except OSError as error:
                self._failed(error, wanted_bytes)
        if self.error:
            raise PoolExhaustedError(
                f"the daemon cannot write its journal {self._path}: {self.error}; "
                "running jobs continue, new ones are refused",
                path=str(self._path),
                reason=self.error,
            )

    def _failed(self, error: OSError, wanted_bytes: int) -> None:
        self.error = error.strerror or str(error)
        if error.errno in _FULL:
            with contextlib.suppress(OSError):
                self.error += f" ({iec(wanted_bytes)} wanted, {iec(self.free_bytes())} free)"

    def try_again(self) -> bool:
        """Returns whether the file accepts records again after a failed `append`.

        If it does, append the missing records again. If not, only `compact` can help.
        """
        if self._lost or self._split or self._fd < 0:
            return False
        self.error = ""
        with contextlib.suppress(PoolExhaustedError):
            self.admit()
        return not self.error

    def _reserve(self, needed_bytes: int) -> None:
        if self._allocated - self._end < needed_bytes:
            wish_bytes = max(needed_bytes, RESERVE_BYTES)
            self._allocated = self._allocate(self._fd, self._end, needed_bytes, wish_bytes)

    def _allocate(self, fd: int, start: int, needed_bytes: int, wish_bytes: int) -> int:
        """Allocates `wish_bytes` from `start`, or `needed_bytes` if the disk is full.

        Returns:
            The end of the allocated space.
        """
        self._failpoints.hit(f"{self._name}.reserve")
        try:
            os.posix_fallocate(fd, start, wish_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            os.posix_fallocate(fd, start, needed_bytes)
            return start + needed_bytes
        return start + wish_bytes

    def append(self, records: Iterable[Record]) -> bool:
        """Writes all records or none; returns whether it did, and sets `error` if not."""
        if self.error:
            return False
        chunks = [_encode(number, x) for number, x in enumerate(records, self._sequence + 1)]
        data = b"".join(chunks)
        try:
            if not self._end:
                data = MAGIC + data
            self._reserve(len(data))
            self._failpoints.hit(f"{self._name}.before_write")
            self._write(data)
        except OSError as error:
            self._failed(error, len(data))
            return False
        self._sequence += len(chunks)
        self._failpoints.hit(f"{self._name}.after_write")
        return True

    def _write(self, data: bytes) -> None:
        if self._failpoints.due(f"{self._name}.torn_write"):
            os.pwrite(self._fd, data[: len(data) // 2], self._end)
            os.kill(os.getpid(), signal.SIGKILL)
        _write_all(self._fd, data, self._end)
        self._end += len(data)

    def begin_sync(self) -> Callable[[], None]:
        """Returns a blocking function that syncs the appended records, for use on any thread.

        The synced records survive a crash of the host. If the sync fails, the function sets
        `error`, and `compact` must replace the file.
        """
        fd = os.dup(self._fd)  # `compact` may replace the file before the sync

        def sync() -> None:
            try:
                os.fdatasync(fd)
            except OSError as error:
                self._lost, self.error = True, error.strerror or str(error)
            finally:
                os.close(fd)

        return sync

    @property
    def wants_compaction(self) -> bool:
        """Returns whether the file is much longer than its facts, or its last write failed."""
        grown = self._end > max(COMPACT_AT_BYTES, COMPACT_AT_GROWTH * self._compacted_bytes)
        return grown or bool(self.error)

    def compact(self, facts: Mapping[str, Any]) -> bool:
        """Replaces the file with one of only these facts; returns whether that succeeded."""
        if self._fd < 0:
            self.error = "it is closed"
            return False
        records = [_encode(number, fact) for number, fact in enumerate(facts.items(), start=1)]
        data = MAGIC + b"".join(records)
        needed_bytes = len(data) + RESERVE_BYTES // 4
        try:
            try:
                self._renew(data, len(records), needed_bytes)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self._move(facts)
        except OSError as error:
            self._failed(error, needed_bytes)
            return False
        self._lost, self.error = False, ""
        return True

    def _renew(self, data: bytes, num_records: int, needed_bytes: int) -> None:
        fresh = self._path.with_name(f"{self._path.name}.new")
        fd = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            fd = files.open_regular(fresh, flags)
            allocated = self._allocate(fd, 0, needed_bytes, len(data) + RESERVE_BYTES)
            _write_all(fd, data, 0)
            self._take_place(fresh, fd)
        except OSError:
            if fd >= 0:
                os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            raise
        self._sequence, self._allocated = num_records, allocated
        self._end = self._compacted_bytes = len(data)

    def _take_place(self, fresh: Path, fd: int) -> None:
        """Renames a complete new file to the journal's path, and uses it from now on."""
        if self._synced:
            os.fsync(fd)
        self._failpoints.hit(f"{self._name}.before_rename")
        os.rename(fresh, self._path)
        if self._synced:
            _sync_directory(self._path.parent)
        with contextlib.suppress(OSError):  # if it stays, its notes do not fit the new file
            os.unlink(self._part)
        os.close(self._fd)
        self._fd, self._split = fd, False

    def _move(self, facts: Mapping[str, Any]) -> None:
        """Replaces the file as `_renew`, but record by record, and cuts the old file for room."""
        os.ftruncate(self._fd, self._end)
        self._allocated = self._end
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | (0 if self._split else os.O_TRUNC)
        fd = files.open_regular(self._part, flags)
        try:
            if self._synced:
                _sync_directory(self._path.parent)
            sequence, end = self._fill(fd, facts)
            self._take_place(self._part, fd)
        except OSError:
            os.close(fd)
            if not self._split:
                with contextlib.suppress(OSError):
                    os.unlink(self._part)
            raise
        self._sequence = sequence
        self._end = self._allocated = self._compacted_bytes = end

    def _fill(self, fd: int, facts: Mapping[str, Any]) -> tuple[int, int]:
        """Writes the missing facts to the second file; returns the number and end of its records.

        Facts that the old file lacks come first, then facts from the old file's end backwards,
        so that the old file can be cut. Raises OSError.
        """
        old, _, _ = _last_records(self._fd)
        new, sequence, at = _last_records(fd)
        os.ftruncate(fd, at)
        if not at:
            self._allocate(fd, 0, _SPARE_BYTES, _SPARE_BYTES)
            _write_all(fd, MAGIC, 0)
            at = len(MAGIC)
        keys = {**old, **new, **facts}.keys() - {_NOTE}
        wanted = {key: _payload((key, facts.get(key))) for key in keys}
        nowhere = (len(MAGIC), b"")

        def place(key: str) -> int:
            end, payload = old.get(key, nowhere)
            return end if payload == wanted[key] else self._end + 1

        lacks = [key for key in keys if new.get(key, nowhere)[1] != wanted[key]]
        lacks.sort(key=place, reverse=True)
        # For each key: the last record of the old file that this or a later key still needs.
        needed = itertools.accumulate((old.get(key, nowhere) for key in reversed(lacks)), max)
        for key, last in zip(lacks, reversed([*needed]), strict=True):
            while True:
                record = _encode(sequence + 1, wanted[key])
                size = len(record) + _SPARE_BYTES
                try:
                    self._allocate(fd, at, size, size)
                    break
                except OSError as error:
                    if error.errno not in _FULL or last[0] >= self._end:
                        raise
                    record = _encode(sequence + 1, (_NOTE, _mark(*last)))
                    self._cut(fd, record, at, last[0])
                    sequence, at = sequence + 1, at + len(record)
            _write_all(fd, record, at)
            sequence, at = sequence + 1, at + len(record)
        return sequence, at

    def _cut(self, fd: int, note: bytes, at: int, end: int) -> None:
        """Writes a note of the old file's new end to the second file, and cuts the old file."""
        _write_all(fd, note, at)
        if self._synced:
            os.fsync(fd)
        self._split = True
        os.ftruncate(self._fd, end)
        self._end = self._allocated = end

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
