"""The sandbox protocol's routes, served by this deployment: people use the sandbox of a thread with their credential for the
deployment."""

from cobox.langgraph.app import create_app

app = create_app()
