"""Control plane routes: every request must be for a thread that the caller may see."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..run import USER_TAG, user_tag
from ..thread_ownership import THREAD_TAG, Thread, belongs_to, parse_time
from . import error_responses
from .address_rewriting import address_rewriter
from .broker_client import BrokerClient, BrokerRefusal, BrokerResponse, path_segment, sandbox_path, session_path
from .caller_identity import User
from .settings import SHARED

# The broker's own limit for request bodies.
MAX_REQUEST_BYTES = 64 * 1024
# Negotiation fields that identify a sandbox.
_HINT_FIELDS = ("sandbox_hint", "sandbox_id", "preferred_sandbox_id", "name")
# Negotiation fields that users of a shared key may set. Fields added in newer brokers are dropped: the broker would check them
# against the deployment's permissions, which are those of all its users together.
_NEGOTIATION_FIELDS = frozenset(
    {
        *("thread_id", "scope", "mode", "actor", "requested_capabilities", "capabilities", "scopes", "access", "ttl", "keep", "tags"),
        *("template", "provider_preference", "token_format", *_HINT_FIELDS),
    }
)
# Sandbox fields that such users may set. Excluded are references to other users' files and settings that templates control.
_SANDBOX_FIELDS = frozenset({"name", "access", "keep", "tags", "template", "env", "lease_seconds", "keep_suspended_seconds"})
_RESERVED_FIELDS = ("snapshot", "mounts", "resources")
# Fields of a negotiation for an unused name that are passed on to the new sandbox.
_NAMED_SANDBOX_FIELDS = ("access", "keep", "tags", "template")
# The sandbox is still starting; the next attempt finds it.
_STARTING_STATUS = 423

RouteHandler = Callable[[Request], Awaitable[Response]]


class ControlPlaneRoutes:
    """The control plane routes, for one broker."""

    def __init__(self, broker: BrokerClient) -> None:
        self.broker = broker
        settings = broker.settings
        self.is_shared = settings.identity == SHARED
        self.rewrite = address_rewriter(settings.broker_url, settings.relay_url) if settings.relay_url else None

    def routes(self) -> list[Route]:
        one, thread, sandbox = "/v1/sandbox/sessions/{session_id}", "/threads/{thread_id}/sandbox", "/v1/sandboxes/{reference}"
        table: list[tuple[str, str, RouteHandler]] = [
            ("POST", "/v1/sandbox/sessions", self.negotiate),
            ("GET", "/v1/sandbox/sessions", self.list_sessions),
            ("GET", one, self.session_route()),
            ("DELETE", one, self.session_route(owner_only=True)),
            *(("POST", f"{one}/{verb}", self.session_route(verb)) for verb in _SESSION_VERBS),
            ("GET", f"{one}/share", self.session_route("share")),
            ("POST", f"{one}/share", self.session_route("share", owner_only=True)),
            ("DELETE", f"{one}/share/{{principal}}", self.session_route("share", owner_only=True)),
            ("POST", thread, self.negotiate),
            ("GET", thread, self.thread_route()),
            ("DELETE", thread, self.release_thread),
            ("POST", f"{thread}/refresh", self.thread_route("/refresh")),
            ("POST", f"{thread}/heartbeat", self.thread_route("/heartbeat")),
            ("GET", "/capabilities", self.capabilities),
            ("GET", "/v1/sandboxes", self.list_sandboxes),
            ("POST", "/v1/sandboxes", self.create_sandbox),
            *((verb, sandbox, self.sandbox_route) for verb in ("GET", "PATCH", "DELETE")),
            ("POST", "/sandbox/{reference}/delegate", self.delegate_sandbox),
        ]
        return [Route(path, with_error_responses(endpoint), methods=[method], include_in_schema=False) for method, path, endpoint in table]

    async def negotiate(self, request: Request) -> Response:
        user, body = User.of(request), await read_body(request)
        named = request.path_params.get("thread_id")
        thread = await self.broker.thread_access.require_visible(request, named if named is not None else _requested_thread(body))
        if named is not None:
            _require_same_thread(body, named)
        body = {key: value for key, value in body.items() if key not in ("thread_id", "scope")} | _thread_fields(body, named, thread.id)
        path = f"/threads/{path_segment(thread.id)}/sandbox" if named is not None else "/v1/sandbox/sessions"
        if not self.is_shared:
            return self.to_response(await self.broker.send(request, "POST", path, body=body, extra=_idempotency_header(request, user)))
        _reject_reserved_fields(body)
        body = {key: value for key, value in body.items() if key in _NEGOTIATION_FIELDS}
        body["tags"] = self._user_tags(user, body.get("tags"), thread)
        await self.broker.require_current_thread(request, user, thread)
        created_id = await self._resolve_hint(request, user, body)
        try:
            reply = await self.broker.send(request, "POST", path, body=body, extra=_idempotency_header(request, user))
        except BaseException:
            await self._delete_created(request, created_id)
            raise
        if reply.status == 200:
            # An existing session, or one that was created concurrently.
            await self.broker.require_current_thread(request, user, thread, str(reply.json().get("session_id")))
        elif reply.status != _STARTING_STATUS:
            await self._delete_created(request, created_id)
        return self.to_response(reply)

    def session_route(self, verb: str = "", owner_only: bool = False) -> RouteHandler:
        async def endpoint(request: Request) -> Response:
            user, session_id = User.of(request), request.path_params["session_id"]
            thread = await self.broker.thread_access.require_visible(
                request, (await self.broker.session_origin(request, session_id)).thread
            )
            await self.broker.require_current_thread(request, user, thread, session_id)
            if owner_only:
                await self.broker.require_owner(request, user, session_id, thread.id)
            rest = [word for word in (verb, request.path_params.get("principal")) if word]
            body = await read_body(request) if request.method == "POST" else None
            reply = await self.broker.send(request, request.method, session_path(session_id, *rest), body=body)
            # A file link is a credential in a URL, which this server would log, so its address is not rewritten.
            return self.to_response(reply, is_rewritten=verb != "file-links")

        return endpoint

    def thread_route(self, rest: str = "") -> RouteHandler:
        async def endpoint(request: Request) -> Response:
            user = User.of(request)
            thread = await self.broker.thread_access.require_visible(request, request.path_params["thread_id"])
            body = await read_body(request) if request.method == "POST" else None
            await self.broker.require_current_thread(request, user, thread)
            return self.to_response(
                await self.broker.send(request, request.method, f"/threads/{path_segment(thread.id)}/sandbox{rest}", body=body)
            )

        return endpoint

    async def release_thread(self, request: Request) -> Response:
        user = User.of(request)
        thread = await self.broker.thread_access.require_visible(request, request.path_params["thread_id"])
        path = f"/threads/{path_segment(thread.id)}/sandbox"
        if self.is_shared:
            await self.broker.require_current_thread(request, user, thread)
            found = await self.broker.send(request, "GET", path)
            if found.status != 200:
                raise BrokerRefusal(found)
            await self.broker.require_owner(request, user, str(found.json().get("session_id")), thread.id)
        return self.to_response(await self.broker.send(request, "DELETE", path))

    async def capabilities(self, request: Request) -> Response:
        user = User.of(request)
        thread = await self.broker.thread_access.require_visible(request, request.query_params.get("thread_id") or "")
        await self.broker.require_current_thread(request, user, thread)
        return self.to_response(await self.broker.send(request, "GET", "/capabilities", query=urlencode({"thread_id": thread.id})))

    async def list_sessions(self, request: Request) -> Response:
        user, pairs = User.of(request), _query_pairs(request)
        params = dict(pairs)
        if params.get("scope_type") == "thread" and params.get("scope_id"):
            thread = await self.broker.thread_access.require_visible(request, params["scope_id"])
            pairs = [(k, v) for k, v in pairs if k not in ("scope_type", "scope_id")] + [("scope_type", "thread"), ("scope_id", thread.id)]
            reply = await self.broker.send(request, "GET", "/v1/sandbox/sessions", query=urlencode(pairs))
            return self.to_response(_current_thread_sessions(user, thread, reply) if self.is_shared and reply.status == 200 else reply)
        if self.is_shared:
            pairs = self._own_only_query(user, pairs)
        return self.to_response(await self.broker.send(request, "GET", "/v1/sandbox/sessions", query=urlencode(pairs)))

    async def list_sandboxes(self, request: Request) -> Response:
        user, pairs = User.of(request), _query_pairs(request)
        pairs = self._own_only_query(user, pairs) if self.is_shared else pairs
        return self.to_response(await self.broker.send(request, "GET", "/v1/sandboxes", query=urlencode(pairs)))

    async def create_sandbox(self, request: Request) -> Response:
        user, body = User.of(request), await read_body(request)
        if self.is_shared:
            _reject_reserved_fields(body)
            body = {key: value for key, value in body.items() if key in _SANDBOX_FIELDS}
            body["tags"] = self._user_tags(user, body.get("tags"))
        return self.to_response(
            await self.broker.send(request, "POST", "/v1/sandboxes", body=body, extra=_idempotency_header(request, user))
        )

    async def sandbox_route(self, request: Request) -> Response:
        user = User.of(request)
        sandbox = await self.broker.owned_sandbox_id(request, user, request.path_params["reference"])
        body = await read_body(request) if request.method == "PATCH" else None
        if body is not None and self.is_shared and isinstance(body.get("tags"), dict) and USER_TAG in body["tags"]:
            raise error_responses.invalid(f"tags.{USER_TAG}: reserved for the deployment; choose another key")
        return self.to_response(await self.broker.send(request, request.method, sandbox_path(sandbox), body=body))

    async def delegate_sandbox(self, request: Request) -> Response:
        user, body = User.of(request), await read_body(request)
        sandbox = await self.broker.owned_sandbox_id(request, user, request.path_params["reference"])
        return self.to_response(await self.broker.send(request, "POST", f"/sandbox/{path_segment(sandbox)}/delegate", body=body))

    async def _resolve_hint(self, request: Request, user: User, body: dict[str, Any]) -> str | None:
        """Resolves a hint to the id of one of the user's sandboxes, so that a concurrent rename cannot redirect it. Returns the
        id of a sandbox created for an unused name."""
        named = {key: body.pop(key) for key in _HINT_FIELDS if body.get(key)}
        if not named:
            return None
        reference = next(iter(named.values()))
        if not isinstance(reference, str) or any(value != reference for value in named.values()):
            raise error_responses.invalid("sandbox_hint: identifies more than one sandbox; send one of sandbox_hint, sandbox_id and name")
        try:
            body["sandbox_hint"] = await self.broker.owned_sandbox_id(request, user, reference)
        except BrokerRefusal as refused:
            may_make = "name" in named and refused.response.status == 404 and body.get("mode", "ensure") in ("ensure", "create_only")
            if not may_make:
                raise
            if body.get("provider_preference"):
                raise error_responses.invalid("provider_preference: not available together with a new name; use a template") from None
            params = {"name": reference} | {key: body[key] for key in _NAMED_SANDBOX_FIELDS if body.get(key) is not None}
            created = await self.broker.send(request, "POST", "/v1/sandboxes", body=params)
            # If another user has taken the name, the broker refuses.
            if created.status not in (200, 201):
                raise BrokerRefusal(created) from None
            # The template is already applied to the new sandbox.
            body.pop("template", None)
            body["sandbox_hint"] = str(created.json().get("id"))
            return str(body["sandbox_hint"])
        return None

    async def _delete_created(self, request: Request, sandbox: str | None) -> None:
        """Deletes a sandbox whose session could not be created and that no user would know about. If this fails too, it ends with
        its lease."""
        if sandbox is not None:
            with contextlib.suppress(error_responses.RequestError):
                await self.broker.send(request, "DELETE", sandbox_path(sandbox))

    def _user_tags(self, user: User, tags: Any, thread: Thread | None = None) -> dict[str, Any]:
        # Some languages encode an empty object as an empty list.
        tags = {} if tags in (None, []) else tags
        if not isinstance(tags, dict):
            raise error_responses.invalid("tags: must be an object of strings")
        marks = {USER_TAG: user_tag(user.identity)}
        if thread is not None and thread.created_at is not None:
            marks[THREAD_TAG] = thread.created_at
        return {**{key: value for key, value in tags.items() if key != THREAD_TAG}, **marks}

    def _own_only_query(self, user: User, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [*pairs, ("tag", f"{USER_TAG}:{user_tag(user.identity)}")]

    def to_response(self, reply: BrokerResponse, is_rewritten: bool = True) -> Response:
        body = reply.body
        is_json = dict(reply.headers).get("content-type", "").startswith("application/json")
        if is_rewritten and self.rewrite is not None and body and is_json:
            body = json.dumps(self.rewrite(reply.json())).encode()
        return Response(body, reply.status, dict(reply.headers))


_SESSION_VERBS = ("refresh", "refresh-token", "heartbeat", "delegate", "file-links")


def with_error_responses(endpoint: RouteHandler) -> RouteHandler:
    """Converts exceptions to error responses."""

    async def around(request: Request) -> Response:
        try:
            return await endpoint(request)
        except error_responses.RequestError as refused:
            return refused.response()
        except BrokerRefusal as refusal:
            return Response(refusal.response.body, refusal.response.status, dict(refusal.response.headers))

    return around


async def read_body(request: Request) -> dict[str, Any]:
    """Parses a request's JSON object; it is serialized again for the broker, so that the broker sees exactly what was checked. No
    body means an empty object."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_REQUEST_BYTES:
            raise error_responses.too_large(f"a request body is limited to {MAX_REQUEST_BYTES} bytes")
    if not body.strip():
        return {}
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise error_responses.invalid("the body must be JSON") from None
    if not isinstance(value, dict):
        raise error_responses.invalid("the body must be a JSON object")
    return value


def _requested_thread(body: dict[str, Any]) -> str:
    scope, thread = body.get("scope"), body.get("thread_id")
    if scope is not None:
        if not isinstance(scope, dict) or not isinstance(scope.get("id"), str):
            raise error_responses.invalid('scope: must be {"type": "thread", "id": …}')
        if scope.get("type") != "thread":
            raise error_responses.forbidden("scope: a deployment only serves sandboxes of its threads")
        if thread is not None and thread != scope["id"]:
            raise error_responses.invalid("scope: differs from thread_id; send one of them")
        return str(scope["id"])
    if not isinstance(thread, str):
        raise error_responses.invalid("thread_id: is missing")
    return thread


def _require_same_thread(body: dict[str, Any], named: str) -> None:
    if (body.get("thread_id") is not None or body.get("scope") is not None) and _requested_thread(body) != named:
        raise error_responses.invalid("thread_id: differs from the thread in the path; leave it out")


def _thread_fields(body: dict[str, Any], named: str | None, thread: str) -> dict[str, Any]:
    """The thread in the format of the request, which determines the format of error responses."""
    if named is not None:
        return {}
    return {"scope": {"type": "thread", "id": thread}} if body.get("scope") is not None else {"thread_id": thread}


def _reject_reserved_fields(body: dict[str, Any]) -> None:
    for name in _RESERVED_FIELDS:
        if body.get(name):
            raise error_responses.forbidden(f"{name}: not available to users of this deployment; its operator can set it in a template")


def _current_thread_sessions(user: User, thread: Thread, reply: BrokerResponse) -> BrokerResponse:
    """Removes the sessions of earlier threads with the same id."""
    page = reply.json()
    if not isinstance(page, dict) or not isinstance(page.get("items"), list):
        raise error_responses.not_a_broker()

    def is_shown(item: Any) -> bool:
        session_created_at = parse_time(item.get("created_at")) if isinstance(item, dict) else None
        return session_created_at is not None and belongs_to(user.identity, thread, item.get("tags") or {}, session_created_at)

    return BrokerResponse(reply.status, reply.headers, json.dumps({**page, "items": [i for i in page["items"] if is_shown(i)]}).encode())


def _idempotency_header(request: Request, user: User) -> dict[str, str] | None:
    """Scopes the idempotency key to the user, because two users may choose the same key."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    return {"idempotency-key": hashlib.sha256(f"{user.identity}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()}


def _query_pairs(request: Request) -> list[tuple[str, str]]:
    return parse_qsl(request.url.query, keep_blank_values=True)
