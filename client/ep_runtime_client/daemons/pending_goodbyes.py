"""Ends sessions later at daemons that were away when a session ended.

A restarted daemon awaits the sessions of its journal as long as their processes live. So a session
that ended while the daemon was away must report it, or its groups would stay claimed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import threading

from ep_runtime.errors import EpRuntimeError, RuntimeUnavailableError
from ep_runtime.v1 import session_service_pb2
from ep_runtime_client.daemons import transport
from ep_runtime_client.daemons.addresses import SocketDirectory

_log = logging.getLogger("ep_runtime")

_TIMEOUT_S = 5.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


@dataclasses.dataclass(frozen=True)
class Owed:
    """One goodbye that could not be sent.

    Attributes:
        place: directory of the daemon's sockets.
        opened: how the session was opened.
        goodbye: the request to send.
    """

    place: SocketDirectory
    opened: session_service_pb2.OpenSessionRequest
    goodbye: session_service_pb2.CloseSessionRequest


class PendingGoodbyes:
    """Goodbyes that could not be sent yet. Thread-safe; a forked child has none."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops all goodbyes in a forked child, because its parent sends them."""
        self._changed = threading.Condition()
        self._owed: dict[str, Owed] = {}
        self._thread: threading.Thread | None = None

    def owe(self, token: str, owed: Owed) -> None:
        """Sends `owed`, the goodbye of the session with `token`, as soon as its daemon answers."""
        with self._changed:
            self._owed[token] = owed
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="ep-runtime-goodbyes", daemon=True
                )
                self._thread.start()

    def say(self, place: SocketDirectory) -> None:
        """Sends goodbyes to that daemon now, because a new session may want the ranks.

        Raises:
            RuntimeUnavailableError: the daemon is still away, or away again.
        """
        with self._changed:
            owed = [item for item in self._owed.items() if item[1].place == place]
        for token, item in owed:
            self._say(token, item)

    def _serve(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._changed:
                if not self._owed:
                    self._thread = None
                    return
                owed = list(self._owed.items())
                self._changed.wait(pause_s * random.uniform(0.8, 1.2))
            for token, item in owed:
                with contextlib.suppress(RuntimeUnavailableError):  # still away
                    self._say(token, item)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _say(self, token: str, owed: Owed) -> None:
        try:
            _close_session(token, owed)
        except RuntimeUnavailableError:
            raise
        except EpRuntimeError as error:
            # The daemon does not know the session, so no goodbye is needed.
            _log.info("ending the session failed: %s", error)
        with self._changed:
            self._owed.pop(token, None)


def _close_session(token: str, owed: Owed) -> None:
    welcome = transport.hello(owed.place, _TIMEOUT_S, resume_token=token)
    control = transport.ControlChannel(owed.place, welcome.session_token)
    try:
        control.call(control.sessions.OpenSession, owed.opened, timeout_s=_TIMEOUT_S)
        control.call(control.sessions.CloseSession, owed.goodbye)
    finally:
        control.close()


pending_goodbyes = PendingGoodbyes()
