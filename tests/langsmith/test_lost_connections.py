"""Connections cut repeatedly during `run()`: no output is lost or duplicated."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import pytest
from cutting_proxy import CuttingProxy
from langsmith.sandbox import Sandbox

CUTS = int(os.environ.get("COBOX_SDK_CUTS", "20"))
SEED = int(os.environ.get("COBOX_SDK_SEED", "4711"))
# Each connection transfers a few hundred kilobytes before it is cut.
LINES = CUTS * 12_000


@pytest.mark.parametrize("transport", ["websocket", "sse"])
def test_output_is_complete_over_repeatedly_cut_connections(
    shared_box: Sandbox, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport == "sse":
        monkeypatch.setenv("LANGSMITH_EXPERIMENTAL_FEATURES", "sandbox_sse_exec")
    where = urlsplit(shared_box.dataplane_url)
    with CuttingProxy(where.hostname or "", where.port or 80, CUTS, SEED) as proxy:
        through = where._replace(netloc=f"127.0.0.1:{proxy.port}").geturl()
        monkeypatch.setattr(shared_box, "dataplane_url", through)
        result = shared_box.run(f"seq -f '%.0f aä€😀' 1 {LINES} & seq 1 {LINES // 4} >&2; wait; exit 5", timeout=600)
        assert proxy.cuts == CUTS, f"only {proxy.cuts} cuts; more output is needed"
    assert result.exit_code == 5
    assert same(result.stdout, "".join(f"{i} aä€😀\n" for i in range(1, LINES + 1)))
    assert same(result.stderr, "".join(f"{i}\n" for i in range(1, LINES // 4 + 1)))


def same(got: str, expected: str) -> bool:
    """Compares without pytest's diff, which takes minutes for megabytes; reports only the first difference."""
    if got == expected:
        return True
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
    around = slice(max(at - 20, 0), at + 20)
    raise AssertionError(f"{len(got)} characters instead of {len(expected)}; at {at}: {got[around]!r}, expected {expected[around]!r}")
