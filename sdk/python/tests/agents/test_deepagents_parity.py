"""Tests that our backend returns the same results as deepagents' scripts on the same sandbox; each intended difference is
explained."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_sandbox import ScriptedSandbox

from cobox import AsyncCobox, Cobox, agent_files, errors
from cobox.deepagents import IS_07, CoboxBackend, agent_backend
from cobox.files import FilesApi

ROOT = "/workspace/tree"
SURROGATE_ERROR = "the text contains an unpaired surrogate, which can't be encoded as UTF-8"
TREE = {
    "a.txt": "one\ntwo\nthree\n",
    "b.py": "import os\nprint('x')\n",
    "src/c.py": "x = 1\ny = x\n",
    "src/deep/d.py": "import os\n",
    "src/deep/e.js": "let x = 1",
    ".hidden/f.py": "import os",
    ".env": "SECRET=1",
    "with space/g (1).txt": "a [b] {c} $d\n",
    "üñí/世界.txt": "世界 мир\n",
    "crlf.txt": "one\r\ntwo\r\nthree\r\n",
    "cr.txt": "one\rtwo\r",
    "no-end": "no newline",
    "newlines": "\n\n\n",
    "empty": "",
    "blank": "   \n",
    ".git/config": "import os",
}


@pytest.fixture(scope="module")
def both(broker: Any) -> Iterator[tuple[CoboxBackend, ScriptedSandbox]]:
    with Cobox(broker.url, broker.agent_key) as client, client.session(f"rules-{os.getpid()}", release=True) as box:
        box.files.upload([(f"{ROOT}/{path}", content) for path, content in TREE.items()])
        box.files.write(f"{ROOT}/binary.bin", bytes(range(256)))
        box.files.write(f"{ROOT}/picture.png", b"not really")
        box.files.write(f"{ROOT}/latin.txt", "é\n".encode("latin-1") * 3)
        box.files.write(f"{ROOT}/big.txt", "".join(f"{n:07d} {'x' * 90}\n" for n in range(30_000)))
        box.files.write(f"{ROOT}/long-line.txt", "y" * 2_000_000 + "\nlast\n")
        box.exec(f"cd {ROOT}; ln -s a.txt link.txt; ln -s nowhere broken.txt; ln -s src linked; echo x > secret; chmod 000 secret").check()
        backend = CoboxBackend(box)
        yield backend, ScriptedSandbox(backend)


def same(both: tuple[Any, Any], ask: Callable[[Any], Any]) -> Any:
    actual, expected = ask(both[0]), ask(both[1])
    assert actual == expected
    return actual


@pytest.mark.parametrize(
    "path", [*TREE, "binary.bin", "picture.png", "big.txt", "link.txt", "broken.txt", "src", "secret", "missing", "src/c.py/x"]
)
def test_a_file_reads_the_same(both: Any, path: str) -> None:
    for window in ({}, {"offset": 1, "limit": 1}, {"offset": 3}, {"limit": 0}):

        def ask(backend: Any, window: Any = window) -> Any:
            result = backend.read(f"{ROOT}/{path}", **window)
            if not IS_07 and window.get("limit") == 0 and "exceeds file length" in (result.error or ""):
                # The script reports the number of lines it had read so far.
                result.error = "nothing was requested"
            if path == "src/c.py/x" and result.error is not None:
                # The script fails with a traceback here, so only the failure itself can be compared.
                result.error = "refused"
            return result

        same(both, ask)


@pytest.mark.parametrize("window", [(0, 100), (9_999, 3), (20_000, 2000), (29_999, 5), (30_000, 5), (0, 2000)])
def test_a_long_file_reads_the_same_for_any_line_range(both: Any, window: tuple[int, int]) -> None:
    actual, expected = (backend.read(f"{ROOT}/big.txt", *window) for backend in both)
    if IS_07 and expected.total_lines is None and actual.total_lines is not None:
        # The script stops counting after a megabyte; our backend knows the total once it has read the end.
        assert actual.total_lines == 30_000
        actual.total_lines = None
    assert actual == expected


def test_an_overlong_line_is_truncated_and_skipped_the_same(both: Any) -> None:
    actual = same(both, lambda backend: backend.read(f"{ROOT}/long-line.txt"))
    assert "Output was truncated" in actual.file_data["content"]
    same(both, lambda backend: backend.read(f"{ROOT}/long-line.txt", offset=1))


def test_reading_a_far_line_is_bounded_in_memory_and_scan_length(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_files, "NEXT_BYTES", 256 * 1024)
    monkeypatch.setattr(agent_files, "FIRST_BYTES", 256 * 1024)
    actual = both[0]
    assert actual.execute("truncate -s 24M one-line").exit_code == 0
    tracemalloc.start()
    try:
        results = actual.read("/workspace/one-line", offset=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "exceeds file length (1 lines)" in results.error
    assert peak < 8 * 1024 * 1024
    monkeypatch.setattr(agent_files, "MAX_SCAN_BYTES", 1024 * 1024)
    assert "first 1048576 bytes have 0 lines" in actual.read("/workspace/one-line", offset=1).error


def test_oversized_files_are_reported_and_the_others_downloaded(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = both[0]
    monkeypatch.setitem(FilesApi.download.flow.__kwdefaults__, "max_bytes", 10_000)
    actual.upload_files([("/workspace/large", b"x" * 20_000), ("/workspace/a", b"a" * 6_000), ("/workspace/b", b"b" * 6_000)])
    paths = ["/workspace/a", "/workspace/large", "/workspace/none", "relative", "/workspace/b"]
    results = [(one.path, one.error, len(one.content or b"")) for one in actual.download_files(paths)]
    assert results == [
        ("/workspace/a", None, 6_000),
        ("/workspace/large", "too_large", 0),
        ("/workspace/none", "file_not_found", 0),
        ("relative", "invalid_path", 0),
        ("/workspace/b", None, 6_000),
    ]
    assert actual.download_files(["/workspace/large"])[0].error == "too_large"


def test_text_that_is_not_utf8_is_returned_the_same(both: Any) -> None:
    same(both, lambda backend: backend.read(f"{ROOT}/latin.txt"))


@pytest.mark.parametrize("path", ["", "/", "/src", "/.hidden", "/missing", "/a.txt", "/üñí"])
def test_a_directory_lists_the_same(both: Any, path: str) -> None:
    def ask(backend: Any) -> Any:
        found = backend.ls(ROOT + path)
        return found.error, sorted((e["path"], e["is_dir"]) for e in found.entries or [])

    same(both, ask)


PATTERNS = [
    "*",
    "*.py",
    "**/*.py",
    "**",
    "src/*",
    "src/**/*.py",
    "*.{py,js}",
    "[ab].*",
    "[!a]*.py",
    ".*",
    ".hidden/*",
    "*/*.py",
    "nothing*",
    "?.txt",
]
PATTERNS += ["src/deep/", "*.txt", "**/deep/*", "with space/*", "üñí/*", "link*", "broken*", "*[0-9]*", "a.txt/**"]


@pytest.mark.parametrize("pattern", PATTERNS + (["**/", "/*.py", "../*", "{a,b}.{txt,py}", "[^a]*.py"] if IS_07 else []))
def test_a_glob_pattern_finds_the_same(both: Any, pattern: str) -> None:
    def ask(backend: Any) -> Any:
        found = backend.glob(pattern, path=ROOT)
        # Python's glob lists the directory itself and adds slashes to directories.
        names = {m["path"].rstrip("/") for m in found.matches or []} - {""}
        if not IS_07:
            names -= {name for name in names if name.startswith("linked/")}
            if pattern.endswith("/**"):
                names -= {pattern[:-3]}
        return found.error, sorted(names)

    same(both, ask)


@pytest.fixture(scope="module")
def symlinked(both: Any) -> str:
    """A directory with symlinks that lead into and out of it."""
    root = "/workspace/symlinked"
    made = both[0].execute(
        f"mkdir -p {root}/in/sub {root}/out; cd {root}; echo s > out/s.txt; echo a > in/a.txt; ln -s in via; cd in;"
        "ln -s ../out/s.txt out.txt; ln -s /etc/hostname host.txt; ln -s ../out dir; ln -s dir/s.txt through.txt; ln -s a.txt ok.txt;"
        f"ln -s ok.txt chain.txt; ln -s loop.txt loop.txt; ln -s {root}/in/a.txt absolute.txt; ln -s ../../in/./a.txt sub/back.txt;"
        f"ln -s {root}/via/a.txt around.txt; ln -s /proc/self/root{root}/in/a.txt magic.txt"
    )
    assert made.exit_code == 0, made.output
    return root


@pytest.mark.parametrize("path", ["in", "via", "in/sub", "", "in/dir"])
def test_symlinks_are_found_only_if_their_target_is_below_the_root(both: Any, symlinked: str, path: str) -> None:
    def ask(backend: Any) -> Any:
        found = backend.glob("**/*.txt" if IS_07 else "*.txt", path=f"{symlinked}/{path}".rstrip("/"))
        names = {m["path"] for m in found.matches or []}
        # /proc/self resolves differently for each process.
        return found.error, sorted(name for name in names if "magic" not in name)

    found = same(both, ask)[1]
    if IS_07 and path == "in":
        names = {name.rpartition("/")[2] for name in found}
        assert names == {"a.txt", "ok.txt", "chain.txt", "absolute.txt", "around.txt", "back.txt"}


def test_a_glob_below_a_missing_directory_has_the_same_error(both: Any) -> None:
    for path in ("/workspace/missing", f"{ROOT}/a.txt"):
        same(both, lambda backend, path=path: backend.glob("*", path=path).error)


@pytest.mark.parametrize("pattern", ["import os", "[b] {c} $d", "世界", "one\ntwo", "-e"])
@pytest.mark.parametrize("glob", [None, "*.{py,js}", "[ab].*"] + (["src/**/*.py", "/b.py"] if IS_07 else []))
def test_a_text_search_finds_the_same(both: Any, pattern: str, glob: str | None) -> None:
    def ask(backend: Any) -> Any:
        found = backend.grep(pattern, path=ROOT, glob=glob)
        matches = {(m["path"], m["line"], m["text"].rstrip("\r")) for m in found.matches or []}
        # Without ripgrep, GNU grep takes braces literally and finds nothing; our backend expands them.
        if glob == "*.{py,js}":
            matches = {m for m in matches if not m[0].endswith((".py", ".js"))}
        # Like GNU grep, our backend separates lines by \n alone; a \r stays part of the line.
        return found.error, sorted(matches)

    same(both, ask)


def test_searching_one_file_and_limiting_matches_gives_the_same(both: Any) -> None:
    same(both, lambda backend: [(m["line"], m["text"]) for m in backend.grep("o", path=f"{ROOT}/a.txt").matches])
    if IS_07:
        actual, expected = (backend.grep("x", path=f"{ROOT}/big.txt", max_count=5) for backend in both)
        assert actual == expected and actual.truncated and len(actual.matches) == 5
        exact = both[0].grep("three", path=ROOT, max_count=2)
        assert len(exact.matches) == 2 and not exact.truncated
        same(both, lambda backend: backend.grep("x", path=f"{ROOT}/big.txt", max_count=0))
        same(both, lambda backend: backend.grep("nowhere at all", path=f"{ROOT}/a.txt", max_count=0))


def test_an_empty_pattern_matches_every_line(both: Any) -> None:
    for path in ("a.txt", "newlines", "no-end", "src"):
        same(
            both,
            lambda backend, path=path: sorted((m["path"], m["line"], m["text"]) for m in backend.grep("", path=f"{ROOT}/{path}").matches),
        )


def test_an_unpaired_surrogate_has_the_same_error_in_every_tool(both: Any) -> None:
    actual = both[0]
    results = [
        actual.write("/workspace/half", "\ud800").error,
        actual.edit(f"{ROOT}/a.txt", "\ud800", "x").error,
        actual.edit(f"{ROOT}/a.txt", "one", "\ud800").error,
        actual.grep("\ud800", path=ROOT).error,
        actual.glob("\ud800", path=ROOT).error,
    ]
    assert [message.rpartition("': ")[2] for message in results] == [SURROGATE_ERROR] * len(results)
    with pytest.raises(errors.InvalidText, match="unpaired surrogate"):
        actual.execute("echo \ud800")


EDITS = [
    ("a b a", "b", "c", False),
    ("a b a", "a", "c", False),
    ("a b a", "a", "c", True),
    ("a b a", "x", "c", False),
    ("a\r\nb\r\nc", "a\nb", "x\ny", False),
    ("a\nb\nc", "a\r\nb", "x\r\ny", False),
    ("a\r\nb", "b", "c\nd", False),
    ("$1 \\n 'q' \"d\" `t`", "'q'", "$(x)", False),
    ("世界", "界", "🌍", False),
    ("abc", "abc", "", False),
    ("aaa", "aa", "b", True),
]


@pytest.mark.parametrize(("before", "old", "new", "replace_all"), EDITS)
def test_an_edit_does_the_same(both: Any, before: str, old: str, new: str, replace_all: bool) -> None:
    path = "/workspace/edited.txt"

    def ask(backend: Any) -> Any:
        both[0].upload_files([(path, before.encode())])
        result = backend.edit(path, old, new, replace_all)
        content = both[0].download_files([path])[0].content
        if before == "a\r\nb" and content == b"a\r\nc\r\nd":
            # Our backend converts inserted line endings to the file's; the scripts mix them.
            content = b"a\r\nc\nd"
        return result, content

    same(both, ask)


def test_an_edit_of_a_missing_or_unreadable_file_has_the_same_error(both: Any) -> None:
    for path in ("missing", "src", "secret"):
        same(both, lambda backend, path=path: backend.edit(f"{ROOT}/{path}", "a", "b"))
    assert "cannot be empty" in both[0].edit(f"{ROOT}/a.txt", "", "x").error


def test_a_write_follows_the_rules_of_the_installed_version(both: Any) -> None:
    for number, backend in enumerate(both):
        path = f"/workspace/written-{number}/new.txt"
        assert backend.write(path, "first").error is None
        second = backend.write(path, "second")
        content = backend.download_files([path])[0].content
        if IS_07:
            assert (second.error, content) == (None, b"second")
        else:
            assert (second.error, content) == (f"Error: File already exists: {path!r}", b"first")
    assert both[0].write("/usr/nope", "x").error == "Failed to write file '/usr/nope': permission_denied"
    assert "unpaired surrogate" in both[0].write("/workspace/half", "\ud800").error


@pytest.mark.skipif(not IS_07, reason="deepagents has delete since 0.7")
def test_delete_removes_directories_and_reports_missing_paths(both: Any) -> None:
    for backend in both:
        both[0].upload_files([("/workspace/gone/a/b", b"x")])
        assert backend.delete("/workspace/gone").path == "/workspace/gone"
        assert backend.delete("/workspace/gone").error == "Error: '/workspace/gone' not found"


def test_execute_returns_both_streams_exit_code_and_timeout(both: Any) -> None:
    actual = both[0]
    result = actual.execute("echo out; echo err >&2; exit 3")
    assert (result.output, result.exit_code, result.truncated) == ("out\n\nerr\n", 3, False)
    assert actual.execute("[[ a == a ]] && pwd").output == "/workspace\n"
    late = actual.execute("echo begun; sleep 60", timeout=1)
    assert "begun" in late.output and "timed out after 1 seconds" in late.output and late.exit_code != 0
    assert actual.execute("head -c 3000000 /dev/zero | tr '\\0' x").truncated


async def test_blocking_and_async_methods_work_with_an_async_session(broker: Any, thread: str) -> None:
    async with AsyncCobox(broker.url, broker.agent_key) as client, client.session(thread, release=True) as box:
        backend = CoboxBackend(box)
        assert (await backend.awrite("/workspace/a", "async\n")).error is None
        assert (await asyncio.to_thread(backend.read, "/workspace/a")).file_data["content"] == "async"
        assert (await backend.aedit("/workspace/a", "async", "both")).occurrences == 1
        assert [m["path"] for m in (await backend.agrep("both", "/workspace")).matches] == ["/workspace/a"]
        assert len((await backend.aglob("*", "/workspace")).matches) == 1
        assert (await backend.als("/workspace")).entries[0]["size"] == 5
        assert (await backend.aexecute("cat a")).output == "both\n"
        assert backend.id == box.sandbox_id
        await backend.aclose()


def test_a_backend_for_a_thread_leaves_its_session_when_closed(broker: Any, thread: str) -> None:
    with Cobox(broker.url, broker.agent_key) as client:
        backend = CoboxBackend.for_thread(thread, client)
        assert backend.write("/workspace/a", "x").error is None
        backend.close()
        with client.session(thread, mode="get", release=True) as box:
            assert box.sandbox_id == backend.id
            assert box.files.read("/workspace/a") == b"x"


def test_errors_an_agent_cannot_fix_are_raised(broker: Any, thread: str) -> None:
    with Cobox(broker.url, broker.agent_key) as client:
        box = client.session(thread)
        backend = CoboxBackend(box)
        box.release()
        box.close()
        for ask in (
            lambda: backend.read("/workspace/a"),
            lambda: backend.execute("true"),
            lambda: backend.ls("/"),
            lambda: backend.upload_files([("/a", b"")]),
        ):
            with pytest.raises(errors.CoboxError):
                ask()


def test_an_agent_works_in_the_humans_sandbox(broker: Any, human: Any, thread: str) -> None:
    """A real deep agent with a scripted model: it writes, runs commands, reads what the human left, and offloads long output."""
    from deepagents import create_deep_agent
    from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage

    class Scripted(GenericFakeChatModel):
        def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
            return self

    def call(name: str, **args: Any) -> AIMessage:
        return AIMessage("", tool_calls=[{"name": name, "args": args, "id": f"call-{name}-{len(str(args))}"}])

    with Cobox(broker.url, broker.agent_key) as client, client.session(thread, release=True) as box, Cobox(broker.url, human) as person:
        with person.session(thread, mode="get") as hers:
            hers.files.write("/workspace/from-human.txt", "please greet\n")
            script = [
                call("read_file", file_path="/workspace/from-human.txt"),
                call("write_file", file_path="/workspace/greet.sh", content="echo hello from the agent\n"),
                call("edit_file", file_path="/workspace/greet.sh", old_string="agent", new_string="robot"),
                call("execute", command="sh greet.sh | tee out.txt"),
                call("execute", command="seq 1 60000"),
                AIMessage("done"),
            ]
            agent = create_deep_agent(model=Scripted(messages=iter(script)), backend=agent_backend(box))
            answer = agent.invoke({"messages": [("user", "go")]})
            results = {m.tool_call_id: m for m in answer["messages"] if m.type == "tool"}
            texts = [str(m.content) for m in results.values()]
            assert "please greet" in texts[0]
            assert any("hello from the robot" in text for text in texts)
            assert hers.files.read_text("/workspace/out.txt") == "hello from the robot\n"
            [offloaded] = hers.fs.list("/tmp/deepagents/large_tool_results").entries
            assert hers.files.read_text(offloaded.path).startswith("1\n2\n3\n")
