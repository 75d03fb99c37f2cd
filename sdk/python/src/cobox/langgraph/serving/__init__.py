"""Serves the protocol's routes in a LangGraph deployment: identifies callers, checks access, and forwards to the broker."""
