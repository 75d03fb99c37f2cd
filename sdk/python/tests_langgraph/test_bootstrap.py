"""What a run may say about its sandbox, and where its token may go."""

from datetime import datetime, timedelta, timezone

import pytest

from cobox import Secret
from cobox.langgraph.bootstrap import Bootstrap, Prefixes, SandboxRefused
from cobox.langgraph.run import USER_TAG, Run, tag_of

NEGOTIATED = {
    "session_id": "ssn_1",
    "thread_id": "thr_1",
    "sandbox": {"id": "sb_1", "provider": "local", "http_base_url": "https://dp.example.com/v1", "ws_base_url": "wss://dp.example.com/v1"},
    "token": "secret-token",
    "expires_at": "2026-02-27T20:20:00Z",
}


def test_a_negotiations_answer_is_read_in_its_simple_and_in_its_full_shape() -> None:
    simple = Bootstrap.read(NEGOTIATED)
    full = Bootstrap.read(
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
def test_the_older_shape_is_read_with_its_url_without_a_version(name: str) -> None:
    told = Bootstrap.read({"sandbox_id": "sb_1", name: "t", "dataplane_url": "https://dp.example.com/sb_1"})
    assert told is not None
    assert (told.token, told.http_base_url) == (Secret("t"), "https://dp.example.com/sb_1/v1")


def test_a_token_is_not_in_what_is_printed() -> None:
    assert "secret-token" not in repr(Bootstrap.read(NEGOTIATED))


@pytest.mark.parametrize(
    "told",
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
def test_what_can_be_read_in_two_ways_or_none_is_refused(told: object) -> None:
    with pytest.raises(SandboxRefused):
        Bootstrap.read(told)


def test_another_threads_sandbox_and_an_expired_token_are_refused() -> None:
    told = Bootstrap.read(NEGOTIATED)
    assert told is not None
    assert told.expires_at is not None
    told.must_be_for("thr_1")
    told.must_be_fresh(told.expires_at - timedelta(seconds=1))
    with pytest.raises(SandboxRefused):
        told.must_be_for("thr_2")
    with pytest.raises(SandboxRefused):
        told.must_be_fresh(told.expires_at)


PREFIXES = Prefixes.from_text("https://dp.example.com/v1, http://127.0.0.1:8421/dp")


@pytest.mark.parametrize(
    "url",
    [
        "https://dp.example.com/v1",
        "https://DP.example.com:443/v1/sb_1",
        "wss://dp.example.com/v1/sb_1/ws",
        "http://127.0.0.1:8421/dp/sb_1/v1",
    ],
)
def test_urls_beneath_a_prefix_may_have_the_token(url: str) -> None:
    PREFIXES.must_have(url, "http_base_url")


@pytest.mark.parametrize(
    "url",
    [
        "http://dp.example.com/v1",  # another scheme
        "https://dp.example.com:8443/v1",  # another port
        "https://dp.example.com/v10",  # begins alike, is no step below
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
def test_any_other_url_gets_no_token_and_is_not_repeated(url: str) -> None:
    with pytest.raises(SandboxRefused) as refused:
        PREFIXES.must_have(url, "http_base_url")
    assert "evil" not in str(refused.value)


def test_without_prefixes_no_url_is_good() -> None:
    with pytest.raises(SandboxRefused):
        Prefixes.from_text("").must_have("https://dp.example.com/v1", "http_base_url")


def test_only_the_servers_own_words_say_who_runs() -> None:
    run = Run.of({"configurable": {"thread_id": "t", "user_id": "root", "sandbox_id": "sb_evil", "langgraph_auth_user_id": "ann"}})
    assert (run.user, run.bootstrap, run.tags()) == ("ann", None, {USER_TAG: "ann"})
    assert Run.of({"configurable": {"thread_id": "t", "user_id": "root"}}).tags() == {}


def test_every_name_is_a_tag_and_no_two_are_the_same() -> None:
    assert tag_of("ann") == "ann"
    long = tag_of("a" * 300)
    assert long.startswith("sha256:")
    assert long != tag_of("a" * 301)
    assert tag_of(long) != long
    assert tag_of("a\nb") != tag_of("a b")
