"""Commands through the unmodified Python SDK, over its WebSocket and over its event stream."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable

import pytest
from langsmith.sandbox import CommandTimeoutError, Sandbox, SandboxConnectionError, SandboxOperationError

SSE = "sandbox_sse_exec"


@pytest.fixture(params=["websocket", "sse"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "sse":
        monkeypatch.setenv("LANGSMITH_EXPERIMENTAL_FEATURES", SSE)
    return str(request.param)


def test_a_command_returns_its_output_and_exit_code(shared_box: Sandbox, transport: str) -> None:
    result = shared_box.run("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    there = shared_box.run('echo "$GREETING in $PWD"', env={"GREETING": "hello"}, cwd="/tmp")
    assert there.stdout == "hello in /tmp\n"
    configured = shared_box.run('echo "$A"; pwd', run_config={"work_dir": "/tmp", "env_vars": {"A": "b"}})
    assert configured.stdout == "b\n/tmp\n"


def test_large_and_multibyte_output_arrives_unchanged(shared_box: Sandbox, transport: str) -> None:
    numbers = shared_box.run("seq 1 300000")
    assert numbers.stdout == "".join(f"{i}\n" for i in range(1, 300001))
    text = "aä€😀\u0000\u2028" * 2000
    encoded = base64.b64encode(text.encode()).decode()
    shared_box.write("/tmp/encoded", encoded)
    assert shared_box.run("base64 -d /tmp/encoded").stdout == text


def test_invalid_utf8_keeps_its_byte_count(shared_box: Sandbox) -> None:
    assert shared_box.run(r"printf 'a\377\342\202b\360'").stdout == "a???b?"


def test_output_arrives_while_the_command_runs(shared_box: Sandbox, transport: str) -> None:
    shared_box.run("rm -f go; mkfifo go")
    handle = shared_box.run("echo first; read x < go; echo second $x", wait=False)
    chunks = iter(handle)
    assert next(chunks).data == "first\n"
    # The command waits for this, so its first line arrived before it ended.
    shared_box.run("echo now > go")
    assert "".join(chunk.data for chunk in chunks) == "second now\n"
    assert handle.result.exit_code == 0
    chunks: list[str] = []
    shared_box.run("echo one; echo two >&2", on_stdout=chunks.append, on_stderr=chunks.append)
    assert sorted(chunks) == ["one\n", "two\n"]


def test_a_command_over_its_time_limit_raises_timeout(shared_box: Sandbox, transport: str) -> None:
    with pytest.raises(CommandTimeoutError):
        shared_box.run("sleep 1000", timeout=1)


def test_input_is_read_until_it_is_closed(shared_box: Sandbox) -> None:
    handle = shared_box.run("cat; echo over", wait=False, close_input=False)
    handle.send_input("typed ä\n")
    handle.close_input()
    assert handle.result.stdout == "typed ä\nover\n"
    # By default the input is closed, so a command that reads it ends at once.
    assert shared_box.run("cat; echo over").stdout == "over\n"


def test_killing_a_command_kills_its_children(shared_box: Sandbox) -> None:
    handle = shared_box.run("sleep 1000 & echo $!; wait", wait=False)
    pid = next(iter(handle)).data.strip()
    handle.kill()
    with pytest.raises(SandboxConnectionError):
        _ = handle.result
    until(lambda: shared_box.run(f"kill -0 {pid}").exit_code != 0)


def test_a_handle_of_another_client_joins_the_same_command(shared_box: Sandbox) -> None:
    shared_box.run("rm -f gate; mkfifo gate")
    first = shared_box.run("echo begun; read x < gate; echo $x", wait=False)
    assert next(iter(first)).data == "begun\n"
    second = shared_box.reconnect(str(first.command_id), stdout_offset=2)
    shared_box.run("echo end > gate")
    assert second.result.stdout == "gun\nend\n"
    assert first.reconnect().result.stdout == "end\n"
    with pytest.raises(SandboxOperationError) as unknown:
        _ = shared_box.reconnect("never-started").result
    assert unknown.value.error_type == "CommandNotFound"


def test_a_pty_command_has_a_terminal(shared_box: Sandbox) -> None:
    result = shared_box.run("tty; echo to stderr >&2", pty=True)
    assert "/dev/pts" in result.stdout and "to stderr" in result.stdout and result.stderr == ""


def test_an_unavailable_user_is_refused(shared_box: Sandbox, transport: str) -> None:
    with pytest.raises(SandboxOperationError, match=r"run_config\.user"):
        shared_box.run("id", run_config={"user": "root"})


def until(is_so: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "the condition was not met in time"
