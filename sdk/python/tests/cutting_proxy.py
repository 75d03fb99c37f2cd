"""A TCP proxy that cuts connections after a number of response bytes, or on demand."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from urllib.parse import urlsplit


class CuttingProxy:
    """`limit` returns, for each connection number, the response bytes after which it is cut; None keeps it open."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "", parts.port or 80)
        self.limit: Callable[[int], int | None] = lambda number: None
        # If set, cuts only connections with a request that begins with this.
        self.only: bytes | None = None
        self.connections = 0
        self.cuts = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_all(self) -> None:
        """Cuts all open connections."""
        with self._lock:
            sockets = list(self._open)
        for one in sockets:
            self._break(one)

    def close(self) -> None:
        self._listener.close()
        self.cut_all()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                number = self.connections
                self.connections += 1
            threading.Thread(target=self._serve, args=(client, number), daemon=True).start()

    def _serve(self, client: socket.socket, number: int) -> None:
        try:
            server = socket.create_connection(self._upstream, 10)
        except OSError:
            client.close()
            return
        with self._lock:
            self._open |= {client, server}
        budget = self.limit(number)
        state = {"budget": budget, "counts": self.only is None}

        def up() -> None:
            self._copy(client, server, None, state)

        worker = threading.Thread(target=up, daemon=True)
        worker.start()
        self._copy(server, client, state["budget"], state)
        worker.join(5)
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def _copy(self, source: socket.socket, target: socket.socket, budget: int | None, state: dict[str, object]) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                if budget is None and self.only is not None and data.startswith(self.only):
                    state["counts"] = True
                if budget is not None and state["counts"]:
                    passed += len(data)
                    if passed >= budget:
                        target.sendall(data[: len(data) - (passed - budget)])
                        self.cuts += 1
                        self._break(source)
                        self._break(target)
                        return
                target.sendall(data)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)

    @staticmethod
    def _break(one: socket.socket) -> None:
        """Closes without a handshake, as a failing network does."""
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.shutdown(socket.SHUT_RDWR)
