"""Files through the unmodified Python SDK: read whole and in part, listed and searched, with the SDK's own exception classes."""

from __future__ import annotations

import pytest
from langsmith.sandbox import ResourceNotFoundError, Sandbox, SandboxOperationError


def test_written_files_are_read_back(shared_box: Sandbox) -> None:
    for content in (b"", b"text\n", bytes(range(256)) * 40_000):
        shared_box.write("/workspace/deep/er/file.bin", content)
        assert shared_box.read("/workspace/deep/er/file.bin") == content
    shared_box.write("relative.txt", "from the shared folder")
    assert shared_box.run("cat /workspace/relative.txt").stdout == "from the shared folder"
    odd = "/workspace/ä ö?&=#%2F.txt"
    shared_box.write(odd, "odd")
    assert shared_box.read(odd) == b"odd"


def test_range_reads_and_conditional_reads(shared_box: Sandbox) -> None:
    shared_box.write("/workspace/part.txt", "0123456789")
    stat = shared_box.stat("/workspace/part.txt")
    assert (stat.size_bytes, bool(stat.etag), bool(stat.last_modified)) == (10, True, True)
    middle = shared_box.read_range("/workspace/part.txt", start=2, end=4)
    assert (middle.content, middle.start, middle.total_bytes, middle.partial) == (b"234", 2, 10, True)
    assert shared_box.read_range("/workspace/part.txt", suffix_bytes=3).content == b"789"
    same = shared_box.read_range("/workspace/part.txt", start=0, if_none_match=stat.etag)
    assert same.unchanged
    rest = shared_box.read_range("/workspace/part.txt", start=5, if_range=stat.etag)
    assert (rest.content, rest.partial) == (b"56789", True)
    shared_box.write("/workspace/part.txt", "another")
    whole = shared_box.read_range("/workspace/part.txt", start=5, if_range=stat.etag)
    assert (whole.content, whole.partial, whole.start) == (b"another", False, 0)
    with pytest.raises(SandboxOperationError, match="past the end"):
        shared_box.read_range("/workspace/part.txt", start=100)


def test_files_are_found_and_searched(shared_box: Sandbox) -> None:
    for name, text in (("a.py", "import os\nneedle\n"), ("sub/b.py", "x\n"), ("sub/c.txt", "needle (here)\n")):
        shared_box.write(f"/workspace/tree/{name}", text)
    found = shared_box.glob("**/*.py", path="/workspace/tree")
    assert sorted(match.path for match in found.matches) == ["/workspace/tree/a.py", "/workspace/tree/sub/b.py"]
    listed = shared_box.ls("/workspace/tree")
    assert {(match.path, match.is_dir) for match in listed.matches} == {("/workspace/tree/a.py", False), ("/workspace/tree/sub", True)}
    hits = shared_box.grep("needle", path="/workspace/tree")
    assert sorted((hit.path, hit.line) for hit in hits.matches) == [("/workspace/tree/a.py", 2), ("/workspace/tree/sub/c.txt", 1)]
    literal = shared_box.grep("needle (", path="/workspace/tree", glob="*.txt")
    assert [hit.text for hit in literal.matches] == ["needle (here)"]
    assert shared_box.glob("*", path="/workspace/tree", limit=1).truncated


def test_file_errors_use_the_sdks_exception_classes(shared_box: Sandbox) -> None:
    for missing in (shared_box.read, shared_box.stat):
        with pytest.raises(ResourceNotFoundError):
            missing("/workspace/none")
    with pytest.raises(SandboxOperationError, match="is a directory"):
        shared_box.read("/workspace")
    with pytest.raises(SandboxOperationError) as denied:
        shared_box.write("/usr/denied", "x")
    assert denied.value.error_type == "PermissionDenied"
    shared_box.write("/workspace/plain", "x")
    with pytest.raises(SandboxOperationError) as refused:
        shared_box.write("/workspace/plain/below", "x")
    assert refused.value.operation == "write"
