"""Authentication and authorization of this deployment: two people with a password each, and threads that only their owner can
see.

A placeholder for a real identity provider. What matters: the `identity` cannot be chosen by the client, threads are filtered by
it, and everything without a rule is refused.
"""

import hmac
import os
from typing import Any

from langgraph_sdk import Auth

from cobox.langgraph import dataplane_visitor

# `name:password` pairs separated by commas; the default is for trying the example on one machine.
PEOPLE: dict[str, str] = dict(pair.split(":", 1) for pair in os.environ.get("EXAMPLE_PEOPLE", "ann:ann-secret,bob:bob-secret").split(","))
# For a broker that asks this deployment who may see a thread: `[thread_authority]` with this key in its `service_key_file`, and
# `user_header = "x-cobox-user"`. Empty: no broker asks.
SERVICE_KEY = os.environ.get("EXAMPLE_SERVICE_KEY", "").encode()
# The principal of this deployment at the broker. It checks its users' access itself before it calls the broker.
DEPLOYMENT = "my-deployment"

auth = Auth()


@auth.authenticate
async def authenticate(path: str, headers: dict[bytes, bytes]) -> dict[str, Any]:
    # A sandbox's own token, which the broker checks.
    if (visitor := dataplane_visitor(path)) is not None:
        return visitor
    if SERVICE_KEY and hmac.compare_digest(headers.get(b"x-api-key", b""), SERVICE_KEY):
        return {"identity": headers.get(b"x-cobox-user", b"").decode(), "permissions": ["ask"]}
    shown = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
    for name, password in PEOPLE.items():
        if hmac.compare_digest(shown, password.encode()):
            return {"identity": name, "permissions": []}
    raise Auth.exceptions.HTTPException(status_code=401, detail="who are you?")


@auth.on
async def nothing_by_default(ctx: Auth.types.AuthContext, value: Any) -> bool:
    return False


@auth.on.assistants.read
@auth.on.assistants.search
async def everybody_may_look_at_assistants(ctx: Auth.types.AuthContext, value: Any) -> None:
    return None


@auth.on.threads
async def threads_are_their_makers(ctx: Auth.types.AuthContext, value: Any) -> dict[str, str] | bool | None:
    if "ask" in ctx.permissions:
        if ctx.action != "read":
            return False
        return None if ctx.user.identity == DEPLOYMENT else {"owner": ctx.user.identity}
    if isinstance(value, dict):
        # Overwrites an owner set by the client.
        value.setdefault("metadata", {})["owner"] = ctx.user.identity
    return {"owner": ctx.user.identity}
