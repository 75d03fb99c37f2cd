"""The protocol's routes as a Starlette app, for a deployment's `"http": {"app": …, "enable_custom_route_auth": true}`.

from cobox.langgraph.app import create_app
app = create_app()            # broker and key from COBOX_URL and COBOX_API_KEY

A deployment that already has an app adds `routes()` to it. Requests are forwarded to a broker, except what LangGraph serves
itself (`DELETE /threads/{thread_id}`), operations, keys, audit, MCP and A2A.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from .serving.broker_client import BrokerClient
from .serving.caller_identity import dataplane_visitor
from .serving.control_plane_routes import ControlPlaneRoutes
from .serving.dataplane_routes import DataplaneRoutes
from .serving.langsmith_routes import LangSmithRoutes
from .serving.settings import Settings, SettingsError

__all__ = ["Settings", "SettingsError", "create_app", "dataplane_visitor", "routes"]


def routes(settings: Settings | None = None) -> list[BaseRoute]:
    """Routes to add to an existing app. Add them to the deployment's own app, not to a mounted one: they call LangGraph through
    the app that serves the request."""
    return _of(BrokerClient(settings or Settings.from_environment()))


def create_app(settings: Settings | None = None) -> Starlette:
    broker = BrokerClient(settings or Settings.from_environment())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await broker.close()

    return Starlette(routes=_of(broker), lifespan=lifespan)


def _of(broker: BrokerClient) -> list[BaseRoute]:
    control = ControlPlaneRoutes(broker)
    return [*control.routes(), *LangSmithRoutes(broker, control).routes(), *DataplaneRoutes(broker).routes()]


def __getattr__(name: str) -> Any:
    # `cobox.langgraph.app:app` in langgraph.json; created on access, so that importing this module needs no settings.
    if name == "app":
        return create_app()
    raise AttributeError(name)
