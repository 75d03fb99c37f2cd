"""Cobox for LangGraph: the sandbox of a run, graphs that work in it, and the protocol's routes in a deployment.

    from cobox.langgraph import graph_factory
    make_graph = graph_factory(lambda backend: create_deep_agent(model=…, backend=backend))     # needs cobox[deepagents]

- `sandbox_for(config)`, `asandbox_for(config)`: the session of a run's thread, in a node, a tool or a graph factory.
- `graph_factory(build)`: for langgraph.json, a graph whose deepagents backend is that sandbox.
- `emit(kind, …)`: an event on the run's stream.
- `cobox.langgraph.app`: the protocol's routes for a deployment's `http.app`; `dataplane_visitor` for its auth handler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .bootstrap import SandboxRefused
from .finding import asandbox_for, sandbox_for
from .stream import emit

if TYPE_CHECKING:
    from .graph import graph_factory
    from .serving.callers import dataplane_visitor

__all__ = ["SandboxRefused", "asandbox_for", "dataplane_visitor", "emit", "graph_factory", "sandbox_for"]


def __getattr__(name: str) -> Any:
    # These need deepagents or Starlette, which not everybody has who needs the rest.
    if name == "graph_factory":
        from .graph import graph_factory

        return graph_factory
    if name == "dataplane_visitor":
        from .serving.callers import dataplane_visitor

        return dataplane_visitor
    raise AttributeError(name)
