"""A TCP proxy that cuts connections at random, with a seed, until it has made the requested number of cuts."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any


class CuttingProxy:
    """Runs in its own thread; `port` is where it listens, `cuts` the number of connections cut so far."""

    def __init__(self, host: str, port: int, cuts: int, seed: int, least: int = 1_000, most: int = 400_000) -> None:
        self.target = (host, port)
        self.wanted = cuts
        self.cuts = 0
        # Range of bytes sent to the client before a connection is cut.
        self.budgets = (least, most)
        self.rng = random.Random(seed)
        self.loop = asyncio.new_event_loop()
        self.port = 0
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> CuttingProxy:
        self.thread.start()
        self.ready.wait()
        return self

    def __exit__(self, *_: Any) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        server = self.loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self.ready.set()
        self.loop.run_forever()
        server.close()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.close()

    async def _serve(self, client_reads: asyncio.StreamReader, client_writes: asyncio.StreamWriter) -> None:
        reads, writes = await asyncio.open_connection(*self.target)
        up = asyncio.create_task(self._copy(client_reads, writes, None))
        down = asyncio.create_task(self._copy(reads, client_writes, self._budget()))
        ends = (up, down)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        for writer in (writes, client_writes):
            writer.close()

    def _budget(self) -> int | None:
        return self.rng.randint(*self.budgets) if self.cuts < self.wanted else None

    async def _copy(self, reads: asyncio.StreamReader, writes: asyncio.StreamWriter, budget: int | None) -> None:
        try:
            while chunk := await reads.read(65536):
                if budget is not None and len(chunk) >= budget:
                    writes.write(chunk[:budget])
                    self.cuts += 1
                    if self.rng.random() < 0.5:
                        # The bytes just written may be lost with it.
                        writes.transport.abort()
                    return
                budget = None if budget is None else budget - len(chunk)
                writes.write(chunk)
                await writes.drain()
        except OSError:
            pass
