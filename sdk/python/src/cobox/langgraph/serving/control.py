"""The control plane's routes: each is for a thread that its caller may see, whatever else the request says."""

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

from ..belonging import THREAD_TAG, Thread, is_for, read_time
from ..run import USER_TAG, tag_of
from . import refusals
from .addresses import through
from .broker import Broker, Handed, Reply, sandbox_path, segment, session_path
from .callers import User
from .settings import SHARED

# As much as the broker reads of a request.
MAX_REQUEST_BYTES = 64 * 1024
# What names a sandbox in a negotiation.
_HINTS = ("sandbox_hint", "sandbox_id", "preferred_sandbox_id", "name")
# What users of a shared key may wish for in a negotiation. Of what a newer broker knows beside it nothing crosses: the broker would judge
# it by what the deployment may, which is what all its users together may.
_NEGOTIATED = frozenset(
    {
        *("thread_id", "scope", "mode", "actor", "requested_capabilities", "capabilities", "scopes", "access", "ttl", "keep", "tags"),
        *("template", "provider_preference", "token_format", *_HINTS),
    }
)
# And of a sandbox itself. What holds others' files is not among them, nor what a template is there to say.
_MADE_OF = frozenset({"name", "access", "keep", "tags", "template", "env", "lease_seconds", "keep_suspended_seconds"})
_NOT_FOR_USERS = ("snapshot", "mounts", "resources")
# Of a negotiation with a name that nobody has yet, for which a sandbox is made first.
_OF_A_NAMED_ONE = ("access", "keep", "tags", "template")
# Starting: it goes on, and the next try finds it.
_LATER = 423

Endpoint = Callable[[Request], Awaitable[Response]]


class Control:
    """The routes, for one broker."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        settings = broker.settings
        self.is_shared = settings.identity == SHARED
        self.rewrite = through(settings.broker_url, settings.relay_url) if settings.relay_url else None

    def routes(self) -> list[Route]:
        one, thread, sandbox = "/v1/sandbox/sessions/{session_id}", "/threads/{thread_id}/sandbox", "/v1/sandboxes/{reference}"
        table: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v1/sandbox/sessions", self.negotiate),
            ("GET", "/v1/sandbox/sessions", self.list_sessions),
            ("GET", one, self.of_session()),
            ("DELETE", one, self.of_session(is_owners=True)),
            *(("POST", f"{one}/{verb}", self.of_session(verb)) for verb in _VERBS),
            ("GET", f"{one}/share", self.of_session("share")),
            ("POST", f"{one}/share", self.of_session("share", is_owners=True)),
            ("DELETE", f"{one}/share/{{principal}}", self.of_session("share", is_owners=True)),
            ("POST", thread, self.negotiate),
            ("GET", thread, self.of_thread()),
            ("DELETE", thread, self.release_thread),
            ("POST", f"{thread}/refresh", self.of_thread("/refresh")),
            ("POST", f"{thread}/heartbeat", self.of_thread("/heartbeat")),
            ("GET", "/capabilities", self.capabilities),
            ("GET", "/v1/sandboxes", self.list_sandboxes),
            ("POST", "/v1/sandboxes", self.create_sandbox),
            *((verb, sandbox, self.of_sandbox) for verb in ("GET", "PATCH", "DELETE")),
            ("POST", "/sandbox/{reference}/delegate", self.delegate_sandbox),
        ]
        return [Route(path, answered(endpoint), methods=[method], include_in_schema=False) for method, path, endpoint in table]

    async def negotiate(self, request: Request) -> Response:
        user, body = User.of(request), await read_body(request)
        named = request.path_params.get("thread_id")
        thread = await self.broker.threads.see(request, named if named is not None else _thread_in(body))
        if named is not None:
            _must_agree(body, named)
        body = {key: value for key, value in body.items() if key not in ("thread_id", "scope")} | _naming(body, named, thread.id)
        path = f"/threads/{segment(thread.id)}/sandbox" if named is not None else "/v1/sandbox/sessions"
        if not self.is_shared:
            return self.answer(await self.broker.ask(request, "POST", path, body=body, extra=_idempotency(request, user)))
        _must_not_have(body)
        body = {key: value for key, value in body.items() if key in _NEGOTIATED}
        body["tags"] = self._marked(user, body.get("tags"), thread)
        await self.broker.must_be_for(request, user, thread)
        made = await self._own_sandbox_only(request, user, body)
        try:
            reply = await self.broker.ask(request, "POST", path, body=body, extra=_idempotency(request, user))
        except BaseException:
            await self._unmake(request, made)
            raise
        if reply.status == 200:
            # One that was there, or came to be meanwhile.
            await self.broker.must_be_for(request, user, thread, str(reply.json().get("session_id")))
        elif reply.status != _LATER:
            await self._unmake(request, made)
        return self.answer(reply)

    def of_session(self, verb: str = "", is_owners: bool = False) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            user, session_id = User.of(request), request.path_params["session_id"]
            thread = await self.broker.threads.see(request, (await self.broker.made(request, session_id)).thread)
            await self.broker.must_be_for(request, user, thread, session_id)
            if is_owners:
                await self.broker.must_own(request, user, session_id, thread.id)
            rest = [word for word in (verb, request.path_params.get("principal")) if word]
            body = await read_body(request) if request.method == "POST" else None
            reply = await self.broker.ask(request, request.method, session_path(session_id, *rest), body=body)
            # A link is a credential in a URL, which this server would write into its log: it stays the broker's.
            return self.answer(reply, is_rewritten=verb != "file-links")

        return endpoint

    def of_thread(self, rest: str = "") -> Endpoint:
        async def endpoint(request: Request) -> Response:
            user = User.of(request)
            thread = await self.broker.threads.see(request, request.path_params["thread_id"])
            body = await read_body(request) if request.method == "POST" else None
            await self.broker.must_be_for(request, user, thread)
            return self.answer(await self.broker.ask(request, request.method, f"/threads/{segment(thread.id)}/sandbox{rest}", body=body))

        return endpoint

    async def release_thread(self, request: Request) -> Response:
        user = User.of(request)
        thread = await self.broker.threads.see(request, request.path_params["thread_id"])
        path = f"/threads/{segment(thread.id)}/sandbox"
        if self.is_shared:
            await self.broker.must_be_for(request, user, thread)
            found = await self.broker.ask(request, "GET", path)
            if found.status != 200:
                raise Handed(found)
            await self.broker.must_own(request, user, str(found.json().get("session_id")), thread.id)
        return self.answer(await self.broker.ask(request, "DELETE", path))

    async def capabilities(self, request: Request) -> Response:
        user = User.of(request)
        thread = await self.broker.threads.see(request, request.query_params.get("thread_id") or "")
        await self.broker.must_be_for(request, user, thread)
        return self.answer(await self.broker.ask(request, "GET", "/capabilities", query=urlencode({"thread_id": thread.id})))

    async def list_sessions(self, request: Request) -> Response:
        user, pairs = User.of(request), _query(request)
        asked = dict(pairs)
        if asked.get("scope_type") == "thread" and asked.get("scope_id"):
            thread = await self.broker.threads.see(request, asked["scope_id"])
            pairs = [(k, v) for k, v in pairs if k not in ("scope_type", "scope_id")] + [("scope_type", "thread"), ("scope_id", thread.id)]
            reply = await self.broker.ask(request, "GET", "/v1/sandbox/sessions", query=urlencode(pairs))
            return self.answer(_only_of(user, thread, reply) if self.is_shared and reply.status == 200 else reply)
        if self.is_shared:
            pairs = self._only_own(user, pairs)
        return self.answer(await self.broker.ask(request, "GET", "/v1/sandbox/sessions", query=urlencode(pairs)))

    async def list_sandboxes(self, request: Request) -> Response:
        user, pairs = User.of(request), _query(request)
        pairs = self._only_own(user, pairs) if self.is_shared else pairs
        return self.answer(await self.broker.ask(request, "GET", "/v1/sandboxes", query=urlencode(pairs)))

    async def create_sandbox(self, request: Request) -> Response:
        user, body = User.of(request), await read_body(request)
        if self.is_shared:
            _must_not_have(body)
            body = {key: value for key, value in body.items() if key in _MADE_OF}
            body["tags"] = self._marked(user, body.get("tags"))
        return self.answer(await self.broker.ask(request, "POST", "/v1/sandboxes", body=body, extra=_idempotency(request, user)))

    async def of_sandbox(self, request: Request) -> Response:
        user = User.of(request)
        sandbox = await self.broker.sandbox(request, user, request.path_params["reference"])
        body = await read_body(request) if request.method == "PATCH" else None
        if body is not None and self.is_shared and isinstance(body.get("tags"), dict) and USER_TAG in body["tags"]:
            raise refusals.invalid(f"tags.{USER_TAG}: is set by the deployment; choose another key")
        return self.answer(await self.broker.ask(request, request.method, sandbox_path(sandbox), body=body))

    async def delegate_sandbox(self, request: Request) -> Response:
        user, body = User.of(request), await read_body(request)
        sandbox = await self.broker.sandbox(request, user, request.path_params["reference"])
        return self.answer(await self.broker.ask(request, "POST", f"/sandbox/{segment(sandbox)}/delegate", body=body))

    async def _own_sandbox_only(self, request: Request, user: User, body: dict[str, Any]) -> str | None:
        """A hint may name a sandbox of the user's; by its id from here on, so that no rename comes between. Gives what it made for that."""
        named = {key: body.pop(key) for key in _HINTS if body.get(key)}
        if not named:
            return None
        reference = next(iter(named.values()))
        if not isinstance(reference, str) or any(value != reference for value in named.values()):
            raise refusals.invalid("sandbox_hint: names more than one sandbox; send one of sandbox_hint, sandbox_id and name")
        try:
            body["sandbox_hint"] = await self.broker.sandbox(request, user, reference)
        except Handed as refused:
            may_make = "name" in named and refused.reply.status == 404 and body.get("mode", "ensure") in ("ensure", "create_only")
            if not may_make:
                raise
            if body.get("provider_preference"):
                raise refusals.invalid("provider_preference: a sandbox with a name is made by a template; send one of them") from None
            wish = {"name": reference} | {key: body[key] for key in _OF_A_NAMED_ONE if body.get(key) is not None}
            made = await self.broker.ask(request, "POST", "/v1/sandboxes", body=wish)
            # A name that somebody took meanwhile is refused by the broker.
            if made.status not in (200, 201):
                raise Handed(made) from None
            # It is made by it already.
            body.pop("template", None)
            body["sandbox_hint"] = str(made.json().get("id"))
            return str(body["sandbox_hint"])
        return None

    async def _unmake(self, request: Request, sandbox: str | None) -> None:
        """Nobody would know of a sandbox whose session could not be had. Where this fails too, it ends with its lease."""
        if sandbox is not None:
            with contextlib.suppress(refusals.Refused):
                await self.broker.ask(request, "DELETE", sandbox_path(sandbox))

    def _marked(self, user: User, tags: Any, thread: Thread | None = None) -> dict[str, Any]:
        # An empty list is how some languages write an empty object.
        tags = {} if tags in (None, []) else tags
        if not isinstance(tags, dict):
            raise refusals.invalid("tags: must be an object of strings")
        marks = {USER_TAG: tag_of(user.identity)}
        if thread is not None and thread.created_at is not None:
            marks[THREAD_TAG] = thread.created_at
        return {**{key: value for key, value in tags.items() if key != THREAD_TAG}, **marks}

    def _only_own(self, user: User, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [*pairs, ("tag", f"{USER_TAG}:{tag_of(user.identity)}")]

    def answer(self, reply: Reply, is_rewritten: bool = True) -> Response:
        body = reply.body
        is_json = dict(reply.headers).get("content-type", "").startswith("application/json")
        if is_rewritten and self.rewrite is not None and body and is_json:
            body = json.dumps(self.rewrite(reply.json())).encode()
        return Response(body, reply.status, dict(reply.headers))


_VERBS = ("refresh", "refresh-token", "heartbeat", "delegate", "file-links")


def answered(endpoint: Endpoint) -> Endpoint:
    """Refusals as answers."""

    async def around(request: Request) -> Response:
        try:
            return await endpoint(request)
        except refusals.Refused as refused:
            return refused.response()
        except Handed as handed:
            return Response(handed.reply.body, handed.reply.status, dict(handed.reply.headers))

    return around


async def read_body(request: Request) -> dict[str, Any]:
    """A request's JSON object, read here and written anew: the broker sees what was checked. No body is an empty object."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_REQUEST_BYTES:
            raise refusals.too_large(f"a request may have {MAX_REQUEST_BYTES} bytes")
    if not body.strip():
        return {}
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise refusals.invalid("the body must be JSON") from None
    if not isinstance(value, dict):
        raise refusals.invalid("the body must be a JSON object")
    return value


def _thread_in(body: dict[str, Any]) -> str:
    scope, thread = body.get("scope"), body.get("thread_id")
    if scope is not None:
        if not isinstance(scope, dict) or not isinstance(scope.get("id"), str):
            raise refusals.invalid('scope: must be {"type": "thread", "id": …}')
        if scope.get("type") != "thread":
            raise refusals.forbidden("scope: through a deployment sandboxes belong to its threads")
        if thread is not None and thread != scope["id"]:
            raise refusals.invalid("scope: names something else than thread_id; send one of them")
        return str(scope["id"])
    if not isinstance(thread, str):
        raise refusals.invalid("thread_id: is missing")
    return thread


def _must_agree(body: dict[str, Any], named: str) -> None:
    if (body.get("thread_id") is not None or body.get("scope") is not None) and _thread_in(body) != named:
        raise refusals.invalid("thread_id: is another thread than the path's; leave it out")


def _naming(body: dict[str, Any], named: str | None, thread: str) -> dict[str, Any]:
    """The thread in the shape it was asked for in, which decides the words of refusals."""
    if named is not None:
        return {}
    return {"scope": {"type": "thread", "id": thread}} if body.get("scope") is not None else {"thread_id": thread}


def _must_not_have(body: dict[str, Any]) -> None:
    for name in _NOT_FOR_USERS:
        if body.get(name):
            raise refusals.forbidden(f"{name}: is not for users of this deployment; its operator can put it into a template")


def _only_of(user: User, thread: Thread, reply: Reply) -> Reply:
    """Without the sessions of earlier threads of the same id."""
    told = reply.json()
    if not isinstance(told, dict) or not isinstance(told.get("items"), list):
        raise refusals.not_a_broker()

    def is_shown(item: Any) -> bool:
        made_at = read_time(item.get("created_at")) if isinstance(item, dict) else None
        return made_at is not None and is_for(user.identity, thread, item.get("tags") or {}, made_at)

    return Reply(reply.status, reply.headers, json.dumps({**told, "items": [i for i in told["items"] if is_shown(i)]}).encode())


def _idempotency(request: Request, user: User) -> dict[str, str] | None:
    """Two users may choose the same key."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    return {"idempotency-key": hashlib.sha256(f"{user.identity}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()}


def _query(request: Request) -> list[tuple[str, str]]:
    return parse_qsl(request.url.query, keep_blank_values=True)
