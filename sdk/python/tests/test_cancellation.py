"""Tests that slow operations do not block an event loop and that cancellation works."""

from __future__ import annotations

import asyncio
import ssl
import threading
from typing import Any

import pytest

from cobox import AsyncSession
from cobox.async_io import AsyncIO
from cobox.network_settings import Network


def test_certificates_are_loaded_once_and_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    read_by: list[int] = []
    real = ssl.create_default_context

    def read(**given: Any) -> ssl.SSLContext:
        read_by.append(threading.get_ident())
        return real(**given)

    monkeypatch.setattr(ssl, "create_default_context", read)
    io = AsyncIO(Network())

    async def use() -> None:
        await io._client("https://broker.example")
        await io._client("https://127.0.0.1")
        assert await io._tls() is io.net.tls()
        await io.close()

    asyncio.run(use())
    assert len(read_by) == 1
    assert read_by[0] != threading.get_ident()


def test_cancelling_close_of_a_session_cancels_the_caller() -> None:
    async def close() -> None:
        session = AsyncSession.from_token("http://127.0.0.1:1", "token")
        is_leaving, may_leave = asyncio.Event(), asyncio.Event()

        async def keep() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                is_leaving.set()
                await may_leave.wait()

        session._upkeep_task = asyncio.create_task(keep())
        await asyncio.sleep(0)
        closing = asyncio.create_task(session.close())
        await is_leaving.wait()
        closing.cancel()
        may_leave.set()
        with pytest.raises(asyncio.CancelledError):
            await closing

    asyncio.run(close())


def test_closing_a_session_stops_its_upkeep() -> None:
    async def close() -> None:
        session = AsyncSession.from_token("http://127.0.0.1:1", "token")
        upkeep = session._upkeep_task = asyncio.create_task(asyncio.sleep(1000))
        await asyncio.sleep(0)
        await session.close()
        assert upkeep.cancelled()

    asyncio.run(close())
