"""Cobox for LangGraph: the sandbox of a run, graphs that work in it, and the protocol's routes in a deployment."""

from .serving.callers import dataplane_visitor

__all__ = ["dataplane_visitor"]
