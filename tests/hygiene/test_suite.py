"""The test suite keeps its own promises."""

import socket

import pytest


def test_the_suite_has_no_network() -> None:
    with (
        socket.socket() as outside,
        pytest.raises(OSError, match="tests run without a network"),
    ):
        outside.connect(("192.0.2.1", 443))
    with pytest.raises(OSError, match=r"looked up 'example\.org'"):
        socket.create_connection(("example.org", 443), timeout=1)


def test_loopback_stays_open_for_notebook_kernels() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()[:2], timeout=5) as client,
    ):
        assert client.getpeername() == server.getsockname()
