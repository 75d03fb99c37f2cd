"""Tests of sessions, commands, files, search and sharing on a real broker, with both clients."""

from __future__ import annotations

import io
import pathlib
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cobox import AsyncSession, Cobox, Session, errors


def test_a_command_returns_output_and_exit_code(kind: Any, box: Any) -> None:
    result = kind.do(box.exec("echo out; echo err >&2; exit 3", env={"A": "b"}, cwd="/tmp"))
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("out\n", "err\n", 3, False)
    with pytest.raises(errors.CommandFailed, match="the command ended with 3: err"):
        result.check()
    assert kind.do(box.exec(argv=["printf", "%s", "a b"])).stdout == "a b"
    assert kind.do(box.exec("cat", stdin="typed")).stdout == "typed"
    assert kind.do(box.exec("printf '\\377'")).stdout_bytes == b"\xff"
    late = kind.do(box.exec("sleep 60", timeout_seconds=0.2))
    assert late.timed_out and not late.ok


def test_a_command_id_runs_only_once(kind: Any, box: Any) -> None:
    for _ in range(2):
        assert kind.do(box.exec("echo ran >> /workspace/count; echo once", command_id="only")).stdout == "once\n"
    assert kind.do(box.files.read_text("/workspace/count")) == "ran\n"


def test_closing_keeps_the_session_and_release_ends_it(kind: Any, client: Any, thread: str) -> None:
    first = kind.do(client.session(thread))
    kind.do(first.files.write("/workspace/kept", "here"))
    kind.do(first.close())
    second = kind.do(client.session(thread, mode="get"))
    assert second.id == first.id
    assert kind.do(second.files.read("/workspace/kept")) == b"here"
    kind.do(second.release())
    with pytest.raises(errors.SessionNotFound):
        kind.do(client.session(thread, mode="get"))
    kind.do(second.close())
    last = kind.do(client.session(thread, mode="create_only", release=True))
    assert last.id != first.id
    kind.do(last.close())
    with pytest.raises(errors.SessionNotFound):
        kind.do(client.session(thread, mode="get"))


def test_files_support_ranges_and_etag_conditions(kind: Any, box: Any) -> None:
    files = box.files
    written = kind.do(files.write("/workspace/deep/er/a.txt", "hello world", mode="600"))
    assert written.size == 11
    assert kind.do(files.read("/workspace/deep/er/a.txt", start=6, end=9)) == b"wor"
    content = kind.do(files.get("/workspace/deep/er/a.txt"))
    assert (content.text, content.head.etag, content.head.mode) == ("hello world", written.etag, "600")
    assert kind.do(files.get("/workspace/deep/er/a.txt", if_none_match=written.etag)) is None
    assert kind.do(files.head("/workspace/deep/er/a.txt")).size == 11
    with pytest.raises(errors.FileChanged):
        kind.do(files.write("/workspace/deep/er/a.txt", "x", create_only=True))
    newer = kind.do(files.write("/workspace/deep/er/a.txt", "second", if_match=written.etag))
    with pytest.raises(errors.FileChanged) as refused:
        kind.do(files.write("/workspace/deep/er/a.txt", "third", if_match=written.etag))
    assert refused.value.request_id is not None and "read it again" in str(refused.value)
    kind.do(files.delete("/workspace/deep/er/a.txt", if_match=newer.etag))
    for ask in (files.read, files.head, files.get):
        with pytest.raises(errors.FileNotFound):
            kind.do(ask("/workspace/deep/er/a.txt"))
    with pytest.raises(errors.RangeNotSatisfiable):
        kind.do(files.write("/workspace/short", b"x"))
        kind.do(files.read("/workspace/short", start=5))


def test_file_names_with_any_bytes_are_preserved(kind: Any, box: Any) -> None:
    for name in (b"/workspace/a b?#%&+;\xc3\xa9", b"/workspace/\xff\xfe"):
        kind.do(box.files.write(name, name))
        assert kind.do(box.files.read(name)) == name
        assert kind.do(box.fs.stat(name)).path_bytes == name
        [found] = kind.do(box.files.download([name]))
        assert found.data == name
    names = [entry.path_bytes for entry in kind.do(box.fs.list("/workspace")).entries]
    assert len(names) == 2
    for bad in ("relative.txt", "/workspace/../etc/passwd", "/a\0b", ""):
        with pytest.raises(errors.InvalidPath):
            kind.do(box.files.read(bad))


def test_local_files_are_uploaded_and_downloaded_in_chunks(kind: Any, box: Any, tmp_path: pathlib.Path) -> None:
    data = bytes(range(256)) * 8192
    local = tmp_path / "up"
    local.write_bytes(data)
    kind.do(box.files.write("/workspace/path", local))
    with local.open("rb") as opened:
        kind.do(box.files.write("/workspace/file", opened))
    kind.do(box.files.write("/workspace/pieces", (data[at : at + 65536] for at in range(0, len(data), 65536))))
    for name in ("path", "file", "pieces"):
        reader = kind.do(box.files.open(f"/workspace/{name}"))
        assert reader.head.size == len(data)
        assert kind.do(reader.save(tmp_path / "down")) == len(data)
        assert (tmp_path / "down").read_bytes() == data
    part = kind.do(box.files.open("/workspace/path", start=10, end=20))
    assert kind.do(part.read()) == data[10:20]


def test_batch_requests_return_one_result_per_file(kind: Any, box: Any) -> None:
    files = [(f"/workspace/many/{n}", f"content {n}") for n in range(510)]
    results = kind.do(box.files.upload([*files, ("/usr/nope", b"x")]))
    assert [r.path for r in results[:2]] == ["/workspace/many/0", "/workspace/many/1"]
    assert all(r.failure is None for r in results[:-1])
    assert isinstance(results[-1].failure, errors.Forbidden)
    found = kind.do(box.files.download([path for path, _ in files] + ["/workspace/nope", "/workspace/many"]))
    assert [f.data for f in found[:-2]] == [content.encode() for _, content in files]
    assert isinstance(found[-2].failure, errors.FileNotFound)
    assert isinstance(found[-1].failure, errors.InvalidRequest)


def test_a_directory_is_transferred_as_an_archive(kind: Any, box: Any) -> None:
    kind.do(box.files.write("/workspace/src/a/b.txt", "packed"))
    tar = kind.do(kind.do(box.files.archive("/workspace/src")).read())
    assert any(name.endswith("a/b.txt") for name in tarfile.open(fileobj=io.BytesIO(tar)).getnames())
    unpacked = kind.do(box.files.unpack("/workspace/copy", tar))
    assert unpacked.entries >= 2
    [found] = kind.do(box.fs.glob("**/b.txt", "/workspace/copy")).matches
    assert kind.do(box.files.read(found.path)) == b"packed"
    kind.do(box.exec("ln -s /etc/hostname /workspace/src/out"))
    tar = kind.do(kind.do(box.files.archive("/workspace/src")).read())
    with pytest.raises(errors.InvalidRequest, match="links=any"):
        kind.do(box.files.unpack("/workspace/all", tar))
    kind.do(box.files.unpack("/workspace/all", tar, links="any"))
    assert kind.do(box.fs.stat("/workspace/all/out")).target == "/etc/hostname"


def test_directories_are_listed_searched_and_changed(kind: Any, box: Any) -> None:
    fs = box.fs
    kind.do(box.files.upload([("/workspace/a.py", "x = 1\ny = 2\n"), ("/workspace/sub/b.py", "x = 3\n"), ("/workspace/c.txt", "x\n")]))
    page = kind.do(fs.list("/workspace", limit=2))
    assert [e.name for e in page.entries] == ["a.py", "c.txt"]
    assert [e.name for e in kind.do(fs.list("/workspace", cursor=page.next_cursor)).entries] == ["sub"]
    assert [m.path for m in kind.do(fs.glob("**/*.py")).matches] == ["/workspace/a.py", "/workspace/sub/b.py"]
    found = kind.do(fs.grep(r"^x = \d", glob="*.py", context=1))
    assert [(m.path, m.line_number, m.text) for m in found.matches] == [
        ("/workspace/a.py", 1, "x = 1"),
        ("/workspace/sub/b.py", 1, "x = 3"),
    ]
    assert found.matches[0].after[0].text == "y = 2"
    assert [f.count for f in kind.do(fs.grep("x", output="count")).counts] == [1, 1, 1]
    edited = kind.do(fs.edit("/workspace/a.py", "x = 1", "x = 10"))
    assert edited.replacements == 1
    with pytest.raises(errors.InvalidRequest) as missing:
        kind.do(fs.edit("/workspace/a.py", "absent", "x"))
    assert missing.value.details["reason"] == "no_match"
    kind.do(fs.mkdir("/workspace/new/er", parents=True))
    with pytest.raises(errors.FileExists):
        kind.do(fs.mkdir("/workspace/new/er"))
    kind.do(fs.move("/workspace/a.py", "/workspace/new/a.py"))
    kind.do(fs.copy("/workspace/new", "/workspace/copy", recursive=True))
    assert kind.do(fs.stat("/workspace/copy/a.py")).type == "file"
    kind.do(fs.remove("/workspace/copy", recursive=True))
    with pytest.raises(errors.FileNotFound):
        kind.do(fs.stat("/workspace/copy"))


def test_watch_reports_changes_with_their_principal(kind: Any, box: Any) -> None:
    watch = kind.do(box.watch("/workspace"))
    kind.do(box.files.write("/workspace/mine", "x"))
    change = kind.do(watch.next())
    assert (change.change, change.path, change.principal, change.actor) == ("created", "/workspace/mine", "agent", "agent")
    kind.do(box.exec("echo > /workspace/theirs"))
    while change.path != "/workspace/theirs":
        change = kind.do(watch.next())
    assert change.principal is None
    kind.do(watch.close())
    kind.do(box.fs.remove("/workspace/mine"))
    again = kind.do(box.watch("/workspace", after=change.cursor))
    for change in kind.each(again):
        if change.change == "removed":
            break
    assert change.path == "/workspace/mine"
    kind.do(again.close())


def test_events_report_actions_and_end_with_the_session(kind: Any, client: Any, thread: str) -> None:
    box = kind.session(client, thread)
    events = kind.do(box.events())
    assert kind.do(events.next()).type == "created"
    kind.do(box.exec("true"))
    seen = kind.do(events.next())
    while seen.type != "exec":
        seen = kind.do(events.next())
    assert (seen.data["command"], seen.data["exit_code"], seen.source) == ("true", 0, "sandbox")
    later = kind.do(box.events(after=seen.id))
    kind.do(box.release())
    for stream in (events, later):
        last = [event.type for event in kind.each(stream)][-1]
        assert last == "terminated"
    kind.do(later.close())


def test_a_human_types_in_a_shell_while_an_agent_observes(kind: Any, broker: Any, box: Any, human: Any, thread: str) -> None:
    ann = kind.client(broker.url, human)
    hers = kind.session(ann, thread)
    shell = kind.do(hers.shells.attach(cols=100, rows=30))
    watching = kind.do(box.shells.observe())
    assert shell.controller is not None and shell.controller.actor == "human"
    kind.do(shell.write("echo $((6*7))-answer\r"))
    assert b"42-answer" in kind.do(shell.read_until("42-answer"))
    assert b"42-answer" in kind.do(watching.read_until("42-answer"))
    kind.do(shell.resize(120, 40))
    while watching.size != (120, 40):
        kind.do(watching.next())
    kind.do(shell.release_control())
    while watching.controller is not None:
        kind.do(watching.next())
    kind.do(shell.close())
    ran = kind.do(box.shells.run("echo in-the-shell"))
    assert "in-the-shell" in ran.output and ran.exit_code == 0
    [info] = kind.do(box.shells.list())
    assert info.name == "main" and kind.do(box.shells.get()).id == info.id
    with pytest.raises(errors.ShellNotFound):
        kind.do(box.shells.run("true", shell="another"))
    kind.do(hers.shells.hang_up("main"))
    while kind.do(watching.next()) is not None:
        pass
    assert watching.exit is not None


def test_a_delegated_token_has_only_its_granted_capabilities(kind: Any, box: Any) -> None:
    kind.do(box.files.write("/workspace/a", "x"))
    delegated = kind.do(box.delegate(["fs_read"], ttl=120))
    assert delegated.granted_capabilities == ["fs_read"]
    make = AsyncSession if kind.is_async else Session
    narrow = make.from_token(box.http_base_url, delegated.token, expires_at=delegated.expires_at)
    assert kind.do(narrow.files.read("/workspace/a")) == b"x"
    for ask in (lambda: narrow.files.write("/workspace/a", "y"), lambda: narrow.exec("true"), lambda: narrow.stream("true")):
        with pytest.raises(errors.CapabilityDenied):
            kind.do(ask())
    with pytest.raises(errors.SettingsMissing):
        kind.do(narrow.heartbeat())
    kind.do(narrow.close())


def test_a_share_grants_access_until_it_is_revoked(kind: Any, broker: Any, operator: Cobox, human: Any, thread: str) -> None:
    name = f"bob-of-{thread}"
    bob = kind.client(broker.url, operator.create_key(name, "human").api_key)
    hers = kind.session(kind.client(broker.url, human), thread, access="owner", release=True)
    with pytest.raises(errors.Forbidden):
        kind.do(bob.session(thread, mode="get"))
    share = kind.do(hers.share(name, ["fs_read"]))
    assert share.capabilities == ["fs_read"]
    assert [s.principal for s in kind.do(hers.shares())] == [name]
    his = kind.session(bob, thread, mode="get")
    assert his.capabilities == {"fs_read"}
    kind.do(his.fs.list("/workspace"))
    kind.do(hers.unshare(name))
    with pytest.raises((errors.TokenRevoked, errors.Forbidden)):
        kind.do(his.fs.list("/workspace"))


def test_a_file_link_opens_one_file_and_is_a_secret(kind: Any, box: Any) -> None:
    import httpx

    kind.do(box.files.write("/workspace/a", "linked"))
    link = kind.do(box.file_link("/workspace/a", ttl=60))
    assert link.url.expose() not in repr(link)
    assert httpx.get(link.url.expose(), trust_env=False).text == "linked"


def test_sandboxes_and_sessions_are_listed_and_named(kind: Any, client: Any, thread: str) -> None:
    made = kind.do(client.create_sandbox(f"named-{thread}", tags={"team": "a"}))
    try:
        box = kind.session(client, thread, sandbox=made.name, tags={"run": thread})
        assert box.sandbox_id == made.id
        assert kind.do(client.get_sandbox(made.name)).threads == [thread]
        page = kind.do(client.session_page(tags=[f"run:{thread}"]))
        assert [s.session_id for s in page.items] == [box.id]
        with pytest.raises(errors.SessionConflict) as refused:
            kind.do(client.session(thread, sandbox=kind.do(client.create_sandbox(f"other-{thread}")).id))
        assert made.id in str(refused.value.details)
        kind.do(client.update_sandbox(made.id, {"tags": {"team": None}}))
        assert "team" not in kind.do(client.get_sandbox(made.id)).tags
    finally:
        kind.do(client.delete_sandbox(made.id))
        kind.do(client.delete_sandbox(f"other-{thread}"))


def test_many_threads_can_use_one_session(broker: Any, thread: str) -> None:
    with Cobox(broker.url, broker.agent_key) as client, client.session(thread, release=True) as box:
        barrier = threading.Barrier(12)

        def work(number: int) -> str:
            barrier.wait()
            box.files.write(f"/workspace/{number}", str(number))
            return box.exec(f"cat /workspace/{number}").stdout + "".join(p.text for p in box.stream(f"echo -n {number}"))

        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(work, range(12))) == [f"{n}{n}" for n in range(12)]


def test_cancelling_exec_kills_the_command(broker: Any, thread: str) -> None:
    import asyncio

    from cobox import AsyncCobox

    async def run() -> list[str]:
        async with AsyncCobox(broker.url, broker.agent_key) as client, client.session(thread, release=True) as box:
            watch = await box.watch("/workspace")
            running = asyncio.create_task(box.exec("touch /workspace/started; exec sleep 1000"))
            await watch.next()
            await watch.close()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return [p.state for p in await box.processes()]

    assert asyncio.run(run()) == ["ended"]
