"""A process that makes NCCL unique ids, and lives until all ranks have joined through it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys

from ep_runtime import env, nccl
from ep_runtime.errors import RuntimeUnavailableError

_CHILD = "ep_runtime_server.nccl.unique_id_child"
# Time to make ids, which includes loading libnccl (400 MB) from a cold disk.
MAKE_S = 30.0


@dataclasses.dataclass(frozen=True)
class UniqueIds:
    """One id per EP domain, and the version of the libnccl that made them."""

    ids: tuple[bytes, ...] = dataclasses.field(repr=False)  # not shown, because ids are secret
    version: str


# Descriptors per process: its input, its pidfd, and both ends of a pipe until it answers.
PROCESS_FDS = 4


class IdProcess:
    """One process that makes ids: call `make`, then `kill` or `close`, on the event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._ended = False

    async def make(self, count: int, life_s: float) -> UniqueIds:
        """Starts the process, which lives at most `life_s`, and returns its ids.

        Raises:
            RuntimeUnavailableError: libnccl is missing, the process cannot be started, or it does
                not answer.
        """
        try:
            reader, writer = os.pipe()
        except OSError as error:
            raise _not_started(error) from error
        try:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, *(["-I"] if sys.flags.isolated else ["-P"]), "-m", _CHILD),
                    *(str(writer), str(count), str(life_s)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                    pass_fds=(writer,),
                    env=env.daemon_environment(),
                )
            except OSError as error:
                raise _not_started(error) from error
            finally:
                os.close(writer)
            self._process = process
            if self._ended:  # killed while it started
                self.kill()
            return await _read(reader, count)
        finally:
            os.close(reader)

    @property
    def over(self) -> bool:
        """Returns whether the process was killed or has ended."""
        return self._ended or (self._process is not None and self._process.returncode is not None)

    def kill(self) -> None:
        """Kills the process without waiting; asyncio reaps it."""
        self._ended = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """Kills the process and waits until it is gone."""
        self.kill()
        if self._process is not None:
            await self._process.wait()


def _not_started(error: OSError) -> RuntimeUnavailableError:
    return RuntimeUnavailableError(
        f"the process that makes NCCL unique ids cannot be started: {error}", library=nccl.LIBRARY
    )


async def _read(reader: int, count: int) -> UniqueIds:
    """Reads the ids that the process wrote. Raises RuntimeUnavailableError."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(os.dup(reader), "rb", 0)
    )
    try:
        async with asyncio.timeout(MAKE_S):
            line = await stream.readline()
        said = json.loads(line)
    except (TimeoutError, ValueError) as error:
        raise RuntimeUnavailableError(
            f"the process that makes NCCL unique ids ended, or did not answer within {MAKE_S:g} s",
            library=nccl.LIBRARY,
        ) from error
    finally:
        transport.close()
    if "error" in said:
        raise RuntimeUnavailableError(
            f"the daemon makes no NCCL unique ids: {said['error']}", library=nccl.LIBRARY
        )
    ids = tuple(bytes.fromhex(text) for text in said["ids"])
    assert len(ids) == count
    return UniqueIds(ids, nccl.version_text(said["version"]))
