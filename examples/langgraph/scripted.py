"""A scripted chat model, so that the example runs offline and always the same way. It understands these messages:

read PATH           reads the file and repeats it
run COMMAND         runs the command and repeats its output
write PATH TEXT     writes the file
delete PATH         removes it after confirmation
anything else       writes a small program with a bug, runs its tests, fixes it, runs them again
"""

from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

PROGRAM = """def leap(year):
    return year % 4 == 0 and year % 100 != 0
"""
TESTS = """import unittest
from leap import leap

class Leap(unittest.TestCase):
    def test_years(self):
        self.assertEqual([y for y in (1900, 1996, 1999, 2000) if leap(y)], [1996, 2000])

unittest.main()
"""
MISTAKE, FIXED = "year % 100 != 0", "(year % 100 != 0 or year % 400 == 0)"

# Tool calls with their arguments, named as in deepagents.
STORY: list[tuple[str, dict[str, Any]]] = [
    ("write_file", {"file_path": "/workspace/leap.py", "content": PROGRAM}),
    ("write_file", {"file_path": "/workspace/test_leap.py", "content": TESTS}),
    ("execute", {"command": "cd /workspace && python3 test_leap.py"}),
    ("edit_file", {"file_path": "/workspace/leap.py", "old_string": MISTAKE, "new_string": FIXED}),
    ("execute", {"command": "cd /workspace && python3 test_leap.py"}),
]


class Scripted(BaseChatModel):
    """Responds with the next step for the last human message."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> "Scripted":
        return self

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> ChatResult:
        start = max((at for at, message in enumerate(messages) if isinstance(message, HumanMessage)), default=0)
        results = [message for message in messages[start:] if isinstance(message, ToolMessage)]
        steps = plan(messages[start].text if messages else "")
        if len(results) < len(steps):
            name, arguments = steps[len(results)]
            call = {"name": name, "args": arguments, "id": f"call-{start}-{len(results)}", "type": "tool_call"}
            answer = AIMessage(content="", tool_calls=[call])
        else:
            answer = AIMessage(content=results[-1].text if results else "I have nothing to do.")
        return ChatResult(generations=[ChatGeneration(message=answer)])


def plan(request: str) -> list[tuple[str, dict[str, Any]]]:
    verb, _, rest = request.strip().partition(" ")
    if verb == "read":
        return [("read_file", {"file_path": rest})]
    if verb == "run":
        return [("execute", {"command": rest})]
    if verb == "write":
        path, _, text = rest.partition(" ")
        return [("write_file", {"file_path": path, "content": text})]
    if verb == "delete":
        return [("delete", {"file_path": rest.partition(" ")[0]})]
    return STORY
