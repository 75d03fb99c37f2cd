"""Event loops end with their tests here; what the backends opened in one is closed before it does."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from cobox.awaiting import AwaitingIO

_made: weakref.WeakSet[AwaitingIO] = weakref.WeakSet()
_init = AwaitingIO.__init__


def _remembered(self: AwaitingIO, *given: Any) -> None:
    _init(self, *given)
    _made.add(self)


AwaitingIO.__init__ = _remembered  # type: ignore[method-assign]


@pytest_asyncio.fixture(autouse=True)
async def _closing_connections() -> AsyncIterator[None]:
    yield
    for io in list(_made):
        for client in io._clients.pop(asyncio.get_running_loop(), {}).values():
            await client.aclose()
