"""What every test runs under: no network, one thread a worker, the same random examples each time."""

import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

# Before any test imports torch or a Hugging Face library; kernels started by tests inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "agg"
N_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
N_THREADS = max(1, (os.cpu_count() or 1) // N_WORKERS)
os.environ["OMP_NUM_THREADS"] = str(N_THREADS)

settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci")


class NetworkIsBlocked(OSError):
    """Raised where a test reaches for anything but this machine."""


def is_local(address: Any) -> bool:
    if not isinstance(address, tuple):  # a path: Unix sockets, which kernels use
        return True
    host = address[0]
    if host in ("localhost", "", None):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_only(connect: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: socket.socket, address: Any) -> Any:
        if not is_local(address):
            raise NetworkIsBlocked(f"tests run without a network, but something called {address!r}")
        return connect(self, address)

    return guarded


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that takes longest goes first, so that the other workers do the rest meanwhile."""
    items.sort(key=lambda item: item.path.name != "test_smoke.py")


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Papermill talks to its kernels over loopback; everything further away is an error."""
    resolve = socket.getaddrinfo

    def guarded_resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_local((host,)):
            raise NetworkIsBlocked(f"tests run without a network, but something looked up {host!r}")
        return resolve(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", local_only(socket.socket.connect))
        patch.setattr(socket.socket, "connect_ex", local_only(socket.socket.connect_ex))
        patch.setattr(socket, "getaddrinfo", guarded_resolve)
        yield
