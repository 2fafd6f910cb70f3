"""Who is let in: the server's own pages and local programs, under the server's own names."""

from __future__ import annotations

import json
import socket

import pytest
from starlette.requests import Request

from branchout.serve.access import Access, HostNames, cookie_name, has_token, host_name, is_loopback


def asked(method: str = "GET", path: str = "/", **headers: str) -> Request:
    listed = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": listed}
    return Request({**scope, "scheme": "http", "server": ("127.0.0.1", 80)})


def verdict(names: HostNames, method: str = "GET", **headers: str) -> str | None:
    async def nothing(*_: object) -> None:
        raise AssertionError

    refusal = Access(nothing, names).refusal(asked(method, **headers))
    return None if refusal is None else json.loads(refusal.body)["error"]


LOCAL = HostNames("127.0.0.1")


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST", "[::1]:8000", "localhost.:9000", "127.0.0.1"]
)
def test_its_own_names_are_let_in(host: str) -> None:
    assert verdict(LOCAL, host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example:8000",
        "localhost.evil.example",
        "evil.example@127.0.0.1",
        "127.0.0.1/evil.example",
        "127.0.0.1:8000, evil.example",
        "192.168.0.7:8000",
        "0.0.0.0:8000",
        "[::1",
        ":8000",
        "",
    ],
)
def test_a_name_that_was_given_its_address_is_not(host: str) -> None:
    refusal = verdict(LOCAL, host=host)
    assert refusal is not None
    assert "not accepted" in refusal


def test_no_host_at_all_is_refused() -> None:
    assert verdict(LOCAL) is not None


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
@pytest.mark.parametrize(
    ("origin", "welcome"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:8000", False),  # another site to a browser, even if the machine is the same
        ("http://127.0.0.1:3000", False),
        ("http://evil.example", False),
        ("https://evil.example", False),
        ("null", False),
        ("", False),
        ("file://", False),
    ],
)
def test_only_its_own_pages_may_use_it(method: str, origin: str, welcome: bool) -> None:
    refusal = verdict(LOCAL, method, host="127.0.0.1:8000", origin=origin)
    assert (refusal is None) == welcome


@pytest.mark.parametrize(
    ("method", "site", "welcome"),
    [
        ("POST", "cross-site", False),
        ("PUT", "same-site", False),
        ("POST", "same-origin", True),
        ("POST", "none", True),
        ("GET", "cross-site", True),  # a link to the page
    ],
)
def test_what_browsers_say_of_where_they_come_from_counts(method: str, site: str, welcome: bool) -> None:
    refusal = verdict(LOCAL, method, host="127.0.0.1:8000", sec_fetch_site=site)
    assert (refusal is None) == welcome


def test_bound_to_all_addresses_it_answers_to_addresses_and_its_own_name() -> None:
    names = HostNames("0.0.0.0", ["lab.example"])
    for host in ("192.168.0.7:8000", "[fe80::1]:8000", "localhost", socket.gethostname(), "lab.example"):
        assert verdict(names, host=host) is None, host
    assert verdict(names, host="evil.example") is not None


def test_bound_to_one_address_it_answers_to_that_alone() -> None:
    names = HostNames("192.168.0.7")
    assert verdict(names, host="192.168.0.7:8000") is None
    assert verdict(names, host="192.168.0.8:8000") is not None
    assert verdict(names, host="localhost:8000") is not None


def test_host_names() -> None:
    assert [host_name(host) for host in ("a:1", "a", "[::1]:2", "a.", "a b", "a:b")] == ["a", "a", "::1", "a", "", ""]


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback(host: str, alone: bool) -> None:
    assert is_loopback(host) == alone


@pytest.mark.parametrize(
    ("headers", "welcome"),
    [
        ({"authorization": "Bearer s3cret token"}, True),
        ({"authorization": "bearer s3cret token"}, True),
        ({"authorization": "Bearer s3cret"}, False),
        ({"authorization": "Basic s3cret token"}, False),
        ({"authorization": "s3cret token"}, False),
        ({"cookie": f'a=b; {cookie_name("s3cret token")}="s3cret token"'}, True),
        ({"cookie": f"{cookie_name('s3cret token')}=other"}, False),
        ({"cookie": "s3cret token"}, False),
        ({"authorization": "Bearer \xff"}, False),
        ({}, False),
    ],
)
def test_a_token_comes_as_a_header_or_as_the_cookie(headers: dict[str, str], welcome: bool) -> None:
    assert has_token(asked(**headers), "s3cret token") == welcome
