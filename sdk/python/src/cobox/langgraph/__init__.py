"""Cobox for LangGraph: the sandbox of a run, graphs that work in it, and the protocol's routes in a deployment.

from cobox.langgraph import graph_factory
make_graph = graph_factory(lambda backend: create_deep_agent(model=…, backend=backend))     # needs cobox[deepagents]

- `sandbox_for(config)`, `asandbox_for(config)`: the session of a run's thread, in a node, a tool or a graph factory.
- `graph_factory(build)`: for langgraph.json, a graph whose deepagents backend is that sandbox.
- `emit(kind, …)`: sends an event to the run's stream.
- `cobox.langgraph.app`: the protocol's routes for a deployment's `http.app`; `dataplane_visitor` for its auth handler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .run_sandbox import asandbox_for, sandbox_for
from .run_stream import emit
from .supplied_sandbox import SandboxRefused

if TYPE_CHECKING:
    from .graph import graph_factory
    from .serving.caller_identity import dataplane_visitor

__all__ = ["SandboxRefused", "asandbox_for", "dataplane_visitor", "emit", "graph_factory", "sandbox_for"]


def __getattr__(name: str) -> Any:
    # Imported lazily: these need deepagents or Starlette, which the rest does not.
    if name == "graph_factory":
        from .graph import graph_factory

        return graph_factory
    if name == "dataplane_visitor":
        from .serving.caller_identity import dataplane_visitor

        return dataplane_visitor
    raise AttributeError(name)
