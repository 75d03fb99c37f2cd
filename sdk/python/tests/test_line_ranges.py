"""Tests that lines of a long file are the same however its content is divided into chunks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cobox import agent_files
from cobox.agent_files import AgentFiles, Lines, _split_lines
from cobox.effects import Flow, Response
from cobox.grant import Grant, Token
from cobox.secret import Secret

ENDS = ["\n", "\r\n", "\r", "\n\n", "", "a", "é", "🌍", "word"]


def read(data: bytes, flow: Flow[Any]) -> Any:
    """Runs the flow on a file with this content."""
    try:
        effect: Any = next(flow)
        while True:
            first, _, last = dict(effect.request.headers)["range"].removeprefix("bytes=").partition("-")
            piece = data[int(first) : int(last) + 1]
            headers = {"content-range": f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}", "etag": '"a"'}
            effect = flow.send(Response(206, headers, piece))
    except StopIteration as done:
        return done.value


@pytest.mark.parametrize("seed", range(40))
def test_a_line_range_is_the_same_for_any_chunking(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice(ENDS) for _ in range(rng.randrange(1, 60))) or "x"
    data, whole = text.encode(), _split_lines(text)
    files = AgentFiles(
        Grant(http_base_url="http://box", ws_base_url=None, token=Token(Secret("t"), 1e18, 1e18), sandbox_id="s", session_id=None)
    )
    monkeypatch.setattr(agent_files, "FIRST_BYTES", rng.randrange(1, 9))
    monkeypatch.setattr(agent_files, "NEXT_BYTES", rng.randrange(1, 9))
    # The first chunk may end within a character and must still count as text.
    monkeypatch.setattr(agent_files, "SNIFF_BYTES", 0)
    for offset in range(len(whole) + 2):
        for limit in (0, 1, 2, 1000):
            page = read(data, files.read_lines("/f", offset, limit, is_text=True))
            assert isinstance(page, Lines), (text, offset, limit)
            assert page.lines == whole[offset : offset + limit], (text, offset, limit)
            assert page.total in (None, len(whole)), (text, offset, limit)
            assert page.has_more or offset + limit >= len(whole), (text, offset, limit)
