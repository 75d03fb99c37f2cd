"""Identifies the caller: the user authenticated by the deployment's own auth handler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import HTTPConnection

from . import error_responses

# The identity of requests without a user: their credential is a sandbox's token, which the broker checks.
DATAPLANE_VISITOR = "cobox-dataplane"
DATAPLANE_PATHS = ("/dp/", "/v1/sandbox/relay/")


def dataplane_visitor(path: str, mount_prefix: str = "") -> dict[str, Any] | None:
    """For a deployment's `@auth.authenticate`: the user to return for paths whose credential is a sandbox's token, `None` for
    every other path.

    That user has no permission for anything else. Without this, clients of the relay send the deployment's credential as usual
    and the token as `X-Api-Key`.
    """
    beneath = path[len(mount_prefix) :] if path.startswith(mount_prefix) else ""
    if not beneath.startswith(DATAPLANE_PATHS):
        return None
    return {"identity": DATAPLANE_VISITOR, "is_authenticated": False, "permissions": []}


@dataclass(frozen=True)
class User:
    """A user authenticated by the deployment."""

    identity: str

    @classmethod
    def of(cls, connection: HTTPConnection) -> User:
        """Fails closed: without an auth handler or a user, or with an auth bypass, the request is refused."""
        user = _authenticated_user(connection)
        if user is None:
            raise error_responses.forbidden(
                'not authenticated: the deployment needs "auth" and "http": {"enable_custom_route_auth": true} in langgraph.json'
            )
        identity = getattr(user, "identity", None)
        if not getattr(user, "is_authenticated", False) or not isinstance(identity, str) or not identity:
            raise error_responses.unauthenticated("these routes need a user authenticated by the deployment's auth handler")
        if _is_studio(user):
            raise error_responses.forbidden('studio bypasses authentication: set "disable_studio_auth": true in langgraph.json')
        return cls(identity)


def is_visitor(connection: HTTPConnection) -> bool:
    return getattr(_authenticated_user(connection), "identity", None) == DATAPLANE_VISITOR


def _authenticated_user(connection: HTTPConnection) -> Any:
    return connection.scope.get("user")


def _is_studio(user: Any) -> bool:
    kinds = {kind.__name__ for kind in type(user).__mro__}
    return "StudioUser" in kinds or (isinstance(user, Mapping) and user.get("kind") == "StudioUser")
