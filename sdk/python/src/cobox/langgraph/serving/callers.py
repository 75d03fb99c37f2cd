"""Who calls: the user that the deployment's own auth handler let in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import HTTPConnection

from . import refusals

# The one way in that has no user: the sandbox's token is the credential, and the broker checks it.
DATAPLANE_VISITOR = "cobox-dataplane"
DATAPLANE_PATHS = ("/dp/", "/v1/sandbox/relay/")


def dataplane_visitor(path: str, mount_prefix: str = "") -> dict[str, Any] | None:
    """For a deployment's `@auth.authenticate`: the user to return for paths whose credential is a sandbox's token.

    Whoever comes there has no leave to anything else; `None` for every other path. Without it, clients of the relay send the
    deployment's credential as always, and the token as `X-Api-Key`.
    """
    beneath = path[len(mount_prefix) :] if path.startswith(mount_prefix) else ""
    if not beneath.startswith(DATAPLANE_PATHS):
        return None
    return {"identity": DATAPLANE_VISITOR, "is_authenticated": False, "permissions": []}


@dataclass(frozen=True)
class User:
    """Somebody whom the deployment knows."""

    identity: str

    @classmethod
    def of(cls, connection: HTTPConnection) -> User:
        """Fails closed: no auth handler, no user, or a bypass of it, is nobody."""
        user = _shown(connection)
        if user is None:
            raise refusals.forbidden(
                'nobody was authenticated: the deployment needs "auth" and "http": {"enable_custom_route_auth": true} in langgraph.json'
            )
        identity = getattr(user, "identity", None)
        if not getattr(user, "is_authenticated", False) or not isinstance(identity, str) or not identity:
            raise refusals.unauthenticated("these routes need a user whom the deployment's auth handler knows")
        if _is_studio(user):
            raise refusals.forbidden('studio comes in without showing who it is: set "disable_studio_auth": true in langgraph.json')
        return cls(identity)


def is_visitor(connection: HTTPConnection) -> bool:
    return getattr(_shown(connection), "identity", None) == DATAPLANE_VISITOR


def _shown(connection: HTTPConnection) -> Any:
    return connection.scope.get("user")


def _is_studio(user: Any) -> bool:
    kinds = {kind.__name__ for kind in type(user).__mro__}
    return "StudioUser" in kinds or (isinstance(user, Mapping) and user.get("kind") == "StudioUser")
