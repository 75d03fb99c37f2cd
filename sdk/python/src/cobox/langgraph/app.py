"""The protocol's routes as a Starlette app, for a deployment's `"http": {"app": …, "enable_custom_route_auth": true}`.

    from cobox.langgraph.app import create_app
    app = create_app()            # COBOX_URL and COBOX_API_KEY say where and as whom

A deployment that has an app already adds `routes()` to it. Everything is forwarded to a broker but what LangGraph serves itself
(`DELETE /threads/{thread_id}`), operations, keys, audit, MCP and A2A.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from .serving.boxes import Boxes
from .serving.broker import Broker
from .serving.callers import dataplane_visitor
from .serving.control import Control
from .serving.dataplane import Dataplane
from .serving.settings import Settings, SettingsError

__all__ = ["Settings", "SettingsError", "create_app", "dataplane_visitor", "routes"]


def routes(settings: Settings | None = None) -> list[BaseRoute]:
    """For an app that has others too. They must be the app's own, not those of another that it mounts: LangGraph is found by it."""
    return _of(Broker(settings or Settings.from_environment()))


def create_app(settings: Settings | None = None) -> Starlette:
    broker = Broker(settings or Settings.from_environment())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await broker.close()

    return Starlette(routes=_of(broker), lifespan=lifespan)


def _of(broker: Broker) -> list[BaseRoute]:
    control = Control(broker)
    return [*control.routes(), *Boxes(broker, control).routes(), *Dataplane(broker).routes()]


def __getattr__(name: str) -> Any:
    # `cobox.langgraph.app:app` in langgraph.json; made when asked for, so that importing this needs no settings.
    if name == "app":
        return create_app()
    raise AttributeError(name)
