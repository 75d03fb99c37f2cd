"""An object that is opened by awaiting it: `await it`, `async with it as x` or `async for item in it`."""

from __future__ import annotations

import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any, Generic, Protocol, TypeVar


class AsyncCloseable(Protocol):
    def close(self) -> Awaitable[None]: ...


T = TypeVar("T", bound=AsyncCloseable)
Item = TypeVar("Item")


class AwaitableContext(Generic[T, Item]):
    def __init__(self, opened: T, begin: Callable[[], Awaitable[Any]]) -> None:
        self._opened, self._begin = opened, begin

    async def _open(self) -> T:
        await self._begin()
        return self._opened

    def __await__(self) -> Generator[Any, None, T]:
        return self._open().__await__()

    async def __aenter__(self) -> T:
        return await self._open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        await self._opened.close()

    async def __aiter__(self) -> AsyncIterator[Item]:
        async with self as opened:
            async for item in opened:  # type: ignore[attr-defined]
                yield item
