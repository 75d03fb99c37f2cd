"""The agent: deepagents with one sandbox per thread, shared with the people of that thread."""

from typing import Any

from deepagents import create_deep_agent
from scripted import Scripted

from cobox.langgraph import graph_factory

PROMPT = "You work in /workspace, which a person shares with you. Run the tests after each change."


def build(backend: Any) -> Any:
    # A real model goes here: create_deep_agent(model="anthropic:…", …) The agent asks before it removes a file; `cobox chat`
    # shows the question.
    return create_deep_agent(model=Scripted(), backend=backend, system_prompt=PROMPT, interrupt_on={"delete": True})


make_graph = graph_factory(build, follow=True)
