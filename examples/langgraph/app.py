"""The sandbox protocol's routes, served by this deployment: people reach the sandbox of a thread with what they log in with here."""

from cobox.langgraph.app import create_app

app = create_app()
