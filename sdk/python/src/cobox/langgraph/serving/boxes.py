"""LangSmith's sandbox API through the deployment, for callers whom the broker knows by themselves."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from . import refusals
from .broker import Broker, Handed, segment
from .callers import User
from .control import Control, Endpoint, read_body
from .settings import SHARED

_METHODS = ["GET", "POST", "PATCH", "DELETE"]
# Its answer has a file link, which is a credential: that stays the broker's, whose log leaves links out.
_LINKS = "download-url"


class Boxes:
    """The routes, for one broker. Boxes, snapshots and volumes belong to no thread, so whoever asks must be somebody to the broker."""

    def __init__(self, broker: Broker, control: Control) -> None:
        self.broker, self.control = broker, control

    def routes(self) -> list[Route]:
        places = ("/v2/sandboxes", "/api/v2/sandboxes")
        return [Route(place + "/{rest:path}", self.at(place), methods=_METHODS, include_in_schema=False) for place in places]

    def at(self, place: str) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            try:
                return await self._forward(request, place)
            except refusals.Refused as refused:
                return _in_their_words(refused)
            except Handed as handed:
                return Response(handed.reply.body, handed.reply.status, dict(handed.reply.headers))

        return endpoint

    async def _forward(self, request: Request, place: str) -> Response:
        User.of(request)
        if self.broker.settings.identity == SHARED:
            raise refusals.forbidden(
                "this deployment has one key for all its users, who would find each other's boxes, snapshots and volumes here; "
                "use the broker's own address, or a deployment with COBOX_LANGGRAPH_IDENTITY=caller"
            )
        steps = request.path_params["rest"].rstrip("/").split("/")
        path = "/".join([place, *(segment(step) for step in steps)])
        has_body = request.method in ("POST", "PATCH") and request.headers.get("content-length", "0") != "0"
        body = await read_body(request) if has_body else None
        query = urlencode(parse_qsl(request.url.query, keep_blank_values=True))
        reply = await self.broker.ask(request, request.method, path, query=query, body=body)
        return self.control.answer(reply, is_rewritten=steps[-1] != _LINKS)


def _in_their_words(refused: refusals.Refused) -> Response:
    kind = _KINDS.get(refused.status, "InvalidRequest")
    detail = {"error": kind, "message": refused.message, "error_id": refusals.new_request_id()}
    return JSONResponse({"detail": detail}, refused.status, {"cache-control": "no-store"})


# As the broker names them there.
_KINDS = {401: "Unauthorized", 403: "PermissionDenied", 404: "NotFound", 503: "ServiceUnavailable"}
