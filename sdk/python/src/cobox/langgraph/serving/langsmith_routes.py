"""LangSmith's sandbox API through the deployment, for callers that authenticate to the broker themselves."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from . import error_responses
from .broker_client import BrokerClient, BrokerRefusal, path_segment
from .caller_identity import User
from .control_plane_routes import ControlPlaneRoutes, RouteHandler, read_body
from .settings import SHARED

_METHODS = ["GET", "POST", "PATCH", "DELETE"]
# The response contains a file link, a credential that this server would log. Its address is not rewritten; the broker's log omits
# links.
_LINKS = "download-url"


class LangSmithRoutes:
    """The LangSmith routes, for one broker. Boxes, snapshots and volumes belong to no thread, so the broker itself must know the
    caller."""

    def __init__(self, broker: BrokerClient, control: ControlPlaneRoutes) -> None:
        self.broker, self.control = broker, control

    def routes(self) -> list[Route]:
        prefixes = ("/v2/sandboxes", "/api/v2/sandboxes")
        return [Route(prefix + "/{rest:path}", self.route(prefix), methods=_METHODS, include_in_schema=False) for prefix in prefixes]

    def route(self, prefix: str) -> RouteHandler:
        async def endpoint(request: Request) -> Response:
            try:
                return await self._forward(request, prefix)
            except error_responses.RequestError as refused:
                return _langsmith_error(refused)
            except BrokerRefusal as refusal:
                return Response(refusal.response.body, refusal.response.status, dict(refusal.response.headers))

        return endpoint

    async def _forward(self, request: Request, prefix: str) -> Response:
        User.of(request)
        if self.broker.settings.identity == SHARED:
            raise error_responses.forbidden(
                "this deployment has one key for all its users, so they would have access to each other's boxes, snapshots and volumes; "
                "use the broker's own address, or a deployment with COBOX_LANGGRAPH_IDENTITY=caller"
            )
        steps = request.path_params["rest"].rstrip("/").split("/")
        path = "/".join([prefix, *(path_segment(step) for step in steps)])
        has_body = request.method in ("POST", "PATCH") and request.headers.get("content-length", "0") != "0"
        body = await read_body(request) if has_body else None
        query = urlencode(parse_qsl(request.url.query, keep_blank_values=True))
        reply = await self.broker.send(request, request.method, path, query=query, body=body)
        return self.control.to_response(reply, is_rewritten=steps[-1] != _LINKS)


def _langsmith_error(refused: error_responses.RequestError) -> Response:
    kind = _KINDS.get(refused.status, "InvalidRequest")
    detail = {"error": kind, "message": refused.message, "error_id": error_responses.new_request_id()}
    return JSONResponse({"detail": detail}, refused.status, {"cache-control": "no-store"})


# Error names of the broker's LangSmith API.
_KINDS = {401: "Unauthorized", 403: "PermissionDenied", 404: "NotFound", 503: "ServiceUnavailable"}
