"""Who may talk to this deployment: two people with a password each, and threads that are nobody else's.

A stand-in for a real identity provider; what matters is that it answers with an `identity` that the client can't choose, that threads are
filtered by it, and that what has no rule is refused.
"""

import hmac
import os
from typing import Any

from langgraph_sdk import Auth

from cobox.langgraph import dataplane_visitor

# `name:password` with commas between; the default is for trying things out on one machine.
PEOPLE: dict[str, str] = dict(pair.split(":", 1) for pair in os.environ.get("EXAMPLE_PEOPLE", "ann:ann-secret,bob:bob-secret").split(","))
# For a broker that asks this deployment whose a thread is: `[thread_authority]` with this key in its `service_key_file`, and
# `user_header = "x-cobox-user"`. Empty: no broker asks.
SERVICE_KEY = os.environ.get("EXAMPLE_SERVICE_KEY", "").encode()
# What this deployment is called there. It asks about its users itself, before it asks the broker.
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
        # On what is made here; a client's own word for it is overwritten.
        value.setdefault("metadata", {})["owner"] = ctx.user.identity
    return {"owner": ctx.user.identity}
