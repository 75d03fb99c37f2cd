"""Each of these tests has its own event loop; connections that a backend opened in it are closed before the loop ends."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from cobox.async_io import AsyncIO

_made: weakref.WeakSet[AsyncIO] = weakref.WeakSet()
_init = AsyncIO.__init__


def _remembered(self: AsyncIO, *given: Any) -> None:
    _init(self, *given)
    _made.add(self)


AsyncIO.__init__ = _remembered  # type: ignore[method-assign]


@pytest_asyncio.fixture(autouse=True)
async def _closing_connections() -> AsyncIterator[None]:
    yield
    for io in list(_made):
        for client in io._clients.pop(asyncio.get_running_loop(), {}).values():
            await client.aclose()
