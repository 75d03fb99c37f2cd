"""Lines of a long file, wherever its pieces are cut: the same as if it had been read whole."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cobox import agent_files
from cobox.agent_files import AgentFiles, Lines, _split
from cobox.flow import Answer, Flow
from cobox.grant import Grant, Token
from cobox.secret import Secret

ENDS = ["\n", "\r\n", "\r", "\n\n", "", "a", "é", "🌍", "word"]


def read(data: bytes, flow: Flow[Any]) -> Any:
    """A page of a file that is nothing but these bytes."""
    try:
        effect: Any = next(flow)
        while True:
            first, _, last = dict(effect.request.headers)["range"].removeprefix("bytes=").partition("-")
            piece = data[int(first) : int(last) + 1]
            headers = {"content-range": f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}", "etag": '"a"'}
            effect = flow.send(Answer(206, headers, piece))
    except StopIteration as done:
        return done.value


@pytest.mark.parametrize("seed", range(40))
def test_a_window_is_the_same_however_the_file_comes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    text = "".join(dice.choice(ENDS) for _ in range(dice.randrange(1, 60))) or "x"
    data, whole = text.encode(), _split(text)
    files = AgentFiles(
        Grant(http_base_url="http://box", ws_base_url=None, token=Token(Secret("t"), 1e18, 1e18), sandbox_id="s", session_id=None)
    )
    monkeypatch.setattr(agent_files, "FIRST_BYTES", dice.randrange(1, 9))
    monkeypatch.setattr(agent_files, "NEXT_BYTES", dice.randrange(1, 9))
    # A first piece that ends within a character is text all the same.
    monkeypatch.setattr(agent_files, "SNIFF_BYTES", 0)
    for offset in range(len(whole) + 2):
        for limit in (0, 1, 2, 1000):
            page = read(data, files.page("/f", offset, limit, is_text=True))
            assert isinstance(page, Lines), (text, offset, limit)
            assert page.lines == whole[offset : offset + limit], (text, offset, limit)
            assert page.total in (None, len(whole)), (text, offset, limit)
            assert page.has_more or offset + limit >= len(whole), (text, offset, limit)
