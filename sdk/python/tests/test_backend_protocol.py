"""Tests of the older backend protocol, and of glob patterns with the rules of both deepagents versions."""

from __future__ import annotations

from typing import Any

import pytest

from cobox.backend_protocol import CoboxFiles
from cobox.glob_pattern import GlobPattern, InvalidPattern, expand_braces


class Both:
    """Calls the blocking or the async variant of a method."""

    def __init__(self, kind: Any, files: CoboxFiles) -> None:
        self._kind, self._files = kind, files

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, f"a{name}" if self._kind.is_async else name)
        return lambda *args, **kwargs: self._kind.do(found(*args, **kwargs))


@pytest.fixture
def files(kind: Any, box: Any) -> Both:
    return Both(kind, CoboxFiles(box))


def test_files_are_created_once_shown_with_line_numbers_and_edited(files: Both) -> None:
    assert files.write("/workspace/a.py", "def a():\n    pass\n").path == "/workspace/a.py"
    assert "already exists" in files.write("/workspace/a.py", "other").error
    assert files.read("/workspace/a.py") == "     1\tdef a():\n     2\t    pass"
    assert files.read("/workspace/a.py", offset=1, limit=1) == "     2\t    pass"
    assert files.read("/workspace/a.py", offset=5) == "Error: Line offset 5 exceeds file length (2 lines)"
    assert files.read("/workspace/none") == "Error: File '/workspace/none' not found"
    files.write("/workspace/empty", "")
    assert "empty contents" in files.read("/workspace/empty")
    files.write("/workspace/long", "x" * 4500)
    assert [line.split("\t")[0].strip() for line in files.read("/workspace/long").splitlines()] == ["1", "1.1", "1.2"]
    assert files.edit("/workspace/a.py", "a", "b").error.startswith("Error: String 'a' appears multiple times")
    assert files.edit("/workspace/a.py", "def a", "def b").occurrences == 1
    assert "not found in file" in files.edit("/workspace/a.py", "def a", "x").error
    assert files.edit("/workspace/none", "a", "b").error == "Error: File '/workspace/none' not found"


def test_files_are_listed_found_and_searched(files: Both) -> None:
    files.write("/workspace/src/a.py", "import os\nx = 1\n")
    files.write("/workspace/src/deep/b.py", "import re\n")
    files.write("/workspace/top.txt", "import nothing")
    assert [i["path"] for i in files.ls_info("/workspace")] == ["/workspace/src/", "/workspace/top.txt"]
    assert files.ls_info("/none") == []
    assert [i["path"] for i in files.glob_info("**/*.py", "/workspace")] == ["/workspace/src/a.py", "/workspace/src/deep/b.py"]
    assert files.glob_info("*.py", "/workspace") == []
    found = files.grep_raw(r"^import \w\w$", path="/workspace", glob="*.py")
    assert [(m["path"], m["line"], m["text"]) for m in found] == [
        ("/workspace/src/a.py", 1, "import os"),
        ("/workspace/src/deep/b.py", 1, "import re"),
    ]
    assert files.grep_raw("(").startswith("Invalid regex pattern")
    assert files.grep_raw("nowhere to be found") == []


OLD = [
    ("*.py", "a.py", True),
    ("*.py", "src/a.py", False),
    ("**/*.py", "a.py", True),
    ("**/*.py", "src/deep/a.py", True),
    ("**/*.py", ".git/a.py", False),
    ("*", ".env", False),
    (".*", ".env", True),
    ("[.]env", ".env", True),
    ("src/**", "src/deep/a", True),
    ("{a,b}", "a", False),
    ("{a,b}", "{a,b}", True),
    ("file?.txt", "file10.txt", False),
    ("file[1-2].txt", "file2.txt", True),
    ("file[!1].txt", "file1.txt", False),
]
NEW = [
    ("*.py", "src/app/main.py", True),
    ("*.yml", ".github/workflows/ci.yml", True),
    ("**/*.yml", ".github/workflows/ci.yml", False),
    ("/*.py", "top.py", True),
    ("/*.py", "src/main.py", False),
    ("src/**/*.py", "src/main.py", True),
    ("src/**/*.py", "src/a/b/main.py", True),
    ("src/**/*.py", "other/src/main.py", False),
    ("*", ".env", False),
    (".env", ".env", True),
    (".env", "deep/.env", True),
    ("*.{py,js}", "a/b.js", True),
    ("*.{py,{ts,js}x}", "b.tsx", True),
    ("*.{py,{ts,js}x}", "b.ts", False),
    ("src/{a,b}/*.py", "src/b/x.py", True),
    ("[^a]*.py", "abc.py", False),
    ("[^a]*.py", "bbc.py", True),
    ("a.py/**", "a.py", False),
    ("a//b.py", "a/b.py", True),
    ("dir/", "dir", False),
    ("{only}.py", "{only}.py", True),
]


@pytest.mark.parametrize(("pattern", "path", "matches"), OLD)
def test_old_patterns_follow_pythons_glob(pattern: str, path: str, matches: bool) -> None:
    assert GlobPattern(pattern, is_basename=False, expands_braces=False).matches(path, is_dir=False) is matches


@pytest.mark.parametrize(("pattern", "path", "matches"), NEW)
def test_new_patterns_follow_the_rules_of_deepagents_0_7(pattern: str, path: str, matches: bool) -> None:
    assert GlobPattern(pattern, is_basename=True, expands_braces=True).matches(path, is_dir=False) is matches


@pytest.mark.parametrize("rules", ["old", "new"])
def test_sandbox_glob_finds_every_path_the_pattern_matches(kind: Any, box: Any, rules: str) -> None:
    """The pattern sent to the sandbox must find a superset of the matches."""
    cases, is_new = (NEW, True) if rules == "new" else (OLD, False)
    paths = sorted({path for _, path, _ in cases if path not in ("src/**", "dir")})
    kind.do(box.files.upload([(f"/workspace/t/{path}", b"") for path in paths]))
    from cobox.agent_files import AgentFiles

    agent_files = AgentFiles(box._grant)
    for pattern in sorted({pattern for pattern, _, _ in cases}):
        flow = agent_files.glob(pattern, "/workspace/t", is_basename=is_new)
        found, _ = kind.do(box._io.run(flow))
        meant = GlobPattern(pattern, is_basename=is_new, expands_braces=is_new)
        here = {relative for relative, entry in found if not entry.is_dir}
        assert here == {path for path in paths if meant.matches(path, is_dir=False)}, pattern


def test_patterns_that_are_too_broad_or_leave_the_root_are_refused() -> None:
    assert expand_braces("{a,b}{c,d}") == ["ac", "ad", "bc", "bd"]
    with pytest.raises(InvalidPattern, match="pattern_too_broad"):
        expand_braces("{a,b}" * 20)
    with pytest.raises(InvalidPattern, match="invalid_pattern"):
        GlobPattern("../*.py", is_basename=True, expands_braces=True)
    # The run time does not grow exponentially with the number of `**`.
    assert not GlobPattern("/".join(["**", "*"] * 30) + "/x", is_basename=True, expands_braces=True).matches(
        "/".join("a" * 60), is_dir=False
    )
