"""The agent: deepagents with a sandbox for each thread, which the people of that thread share with it."""

from typing import Any

from deepagents import create_deep_agent
from scripted import Scripted

from cobox.langgraph import graph_factory

PROMPT = "You work in /workspace, which a person shares with you. Run the tests after each change."


def build(backend: Any) -> Any:
    # A real model goes here: create_deep_agent(model="anthropic:…", …)
    # Before it removes a file it asks: `cobox chat` shows the question, and whoever talks with it decides.
    return create_deep_agent(model=Scripted(), backend=backend, system_prompt=PROMPT, interrupt_on={"delete": True})


make_graph = graph_factory(build, follow=True)
