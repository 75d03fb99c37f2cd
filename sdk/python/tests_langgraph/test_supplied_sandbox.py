"""Tests of parsing the sandbox that a run supplies, and of the URLs to which its token may be sent."""

from datetime import datetime, timedelta, timezone

import pytest

from cobox import Secret
from cobox.langgraph.run import USER_TAG, Run, user_tag
from cobox.langgraph.supplied_sandbox import AllowedPrefixes, SandboxRefused, SuppliedSandbox

NEGOTIATED = {
    "session_id": "ssn_1",
    "thread_id": "thr_1",
    "sandbox": {"id": "sb_1", "provider": "local", "http_base_url": "https://dp.example.com/v1", "ws_base_url": "wss://dp.example.com/v1"},
    "token": "secret-token",
    "expires_at": "2026-02-27T20:20:00Z",
}


def test_simple_and_full_negotiation_responses_are_parsed() -> None:
    simple = SuppliedSandbox.read(NEGOTIATED)
    full = SuppliedSandbox.read(
        {
            "binding": {"id": "ssn_1", "scope": {"type": "thread", "id": "thr_1"}, "sandbox_id": "sb_1"},
            "dataplane": {"http_base_url": "https://dp.example.com/v1", "ws_base_url": "wss://dp.example.com/v1"},
            "credentials": {"access_token": "secret-token", "expires_at": "2026-02-27T20:20:00Z"},
        }
    )
    assert simple is not None
    assert full is not None
    assert (simple.sandbox_id, simple.session_id, simple.token) == (full.sandbox_id, full.session_id, full.token)
    assert simple.http_base_url == full.http_base_url == "https://dp.example.com/v1"
    assert simple.expires_at == datetime(2026, 2, 27, 20, 20, tzinfo=timezone.utc)


@pytest.mark.parametrize("name", ["credential", "sandbox_credential"])
def test_the_older_format_is_parsed_with_its_unversioned_url(name: str) -> None:
    value = SuppliedSandbox.read({"sandbox_id": "sb_1", name: "t", "dataplane_url": "https://dp.example.com/sb_1"})
    assert value is not None
    assert (value.token, value.http_base_url) == (Secret("t"), "https://dp.example.com/sb_1/v1")


def test_a_token_is_not_in_the_repr() -> None:
    assert "secret-token" not in repr(SuppliedSandbox.read(NEGOTIATED))


@pytest.mark.parametrize(
    "value",
    [
        "sb_1",
        {},
        {"sandbox_id": 7},
        {"sandbox_id": "a\nb"},
        {"sandbox_id": "x" * 257},
        {"sandbox_id": "sb_1", "sandbox": {"id": "sb_2"}},
        {"sandbox_id": "sb_1", "token": "a", "credential": "b"},
        {"sandbox_id": "sb_1", "credential": "cbx_an-api-key"},
        {"sandbox_id": "sb_1", "expires_at": "soon"},
        {"sandbox": "sb_1"},
    ],
)
def test_ambiguous_and_invalid_input_is_refused(value: object) -> None:
    with pytest.raises(SandboxRefused):
        SuppliedSandbox.read(value)


def test_another_threads_sandbox_and_an_expired_token_are_refused() -> None:
    value = SuppliedSandbox.read(NEGOTIATED)
    assert value is not None
    assert value.expires_at is not None
    value.require_thread("thr_1")
    value.require_unexpired(value.expires_at - timedelta(seconds=1))
    with pytest.raises(SandboxRefused):
        value.require_thread("thr_2")
    with pytest.raises(SandboxRefused):
        value.require_unexpired(value.expires_at)


PREFIXES = AllowedPrefixes.from_text("https://dp.example.com/v1, http://127.0.0.1:8421/dp")


@pytest.mark.parametrize(
    "url",
    [
        "https://dp.example.com/v1",
        "https://DP.example.com:443/v1/sb_1",
        "wss://dp.example.com/v1/sb_1/ws",
        "http://127.0.0.1:8421/dp/sb_1/v1",
    ],
)
def test_urls_below_a_prefix_are_allowed(url: str) -> None:
    PREFIXES.require_allowed(url, "http_base_url")


@pytest.mark.parametrize(
    "url",
    [
        "http://dp.example.com/v1",  # another scheme
        "https://dp.example.com:8443/v1",  # another port
        "https://dp.example.com/v10",  # the same beginning, but not a path below
        "https://dp.example.com/",
        "https://dp.example.com.evil.example/v1",
        "https://dp.example.com@evil.example/v1",
        "https://user:pass@dp.example.com/v1",
        "https://evil.example\\@dp.example.com/v1",
        "https://evil.example/v1?https://dp.example.com/v1",
        "https://dp.example.com/v1#@evil.example",
        "https://dp.example.com/v1/../admin",
        "https://dp.example.com/v1/%2e%2e/admin",
        "https://dp.example.com/v1/%252e%252e/admin",
        "https://dp.example.com/v1%2f..%2fadmin",
        "https://dp.example.com./v1",
        "https://dp.ex\tample.com/v1",
        " https://dp.example.com/v1",
        "https://dp.exämple.com/v1",
        "https:///v1",
        "//dp.example.com/v1",
        "file:///v1",
        "https://dp.example.com:x/v1",
        "https://dp.example.com/v1/" + "a" * 3000,
    ],
)
def test_other_urls_are_refused_without_quoting_them(url: str) -> None:
    with pytest.raises(SandboxRefused) as refused:
        PREFIXES.require_allowed(url, "http_base_url")
    assert "evil" not in str(refused.value)


def test_without_prefixes_no_url_is_allowed() -> None:
    with pytest.raises(SandboxRefused):
        AllowedPrefixes.from_text("").require_allowed("https://dp.example.com/v1", "http_base_url")


def test_only_server_set_fields_identify_the_user() -> None:
    run = Run.of({"configurable": {"thread_id": "t", "user_id": "root", "sandbox_id": "sb_evil", "langgraph_auth_user_id": "ann"}})
    assert (run.user, run.supplied, run.tags()) == ("ann", None, {USER_TAG: "ann"})
    assert Run.of({"configurable": {"thread_id": "t", "user_id": "root"}}).tags() == {}


def test_every_user_name_has_a_unique_valid_tag() -> None:
    assert user_tag("ann") == "ann"
    long = user_tag("a" * 300)
    assert long.startswith("sha256:")
    assert long != user_tag("a" * 301)
    assert user_tag(long) != long
    assert user_tag("a\nb") != user_tag("a b")
