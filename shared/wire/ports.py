"""A port on loopback that stays one's own while no server listens on it."""

from __future__ import annotations

import socket
import sys


class HeldPort:
    """A free port of 127.0.0.1, for a server that is to come and to come back after a restart.

    A socket that is bound but does not listen keeps the port from everybody who lets the kernel choose one: other servers and
    outgoing connections. A server that names the port and sets SO_REUSEADDR, as ours do, is let in beside it. That is Linux;
    elsewhere the port is merely one that was free.

    >>> held = HeldPort()
    >>> held.port
    40123
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        if sys.platform != "linux":
            self._socket.close()

    def close(self) -> None:
        """Gives the port back. So does the end of this object."""
        self._socket.close()
