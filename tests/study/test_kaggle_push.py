"""Kaggle's own client takes what `polykv kaggle export` writes; a local server answers for Kaggle."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polykv_lib.study import cli

Calls = list[tuple[str, Any]]
REFUSED = {"GetDatasetStatus": 404}  # there is no such dataset yet
ANSWERS = {
    "StartBlobUpload": {"token": "blob", "createUrl": "{at}/upload"},
    "CreateDataset": {"status": "ok", "url": "{at}/me/wheels"},
    "SaveKernel": {"versionNumber": 1, "url": "{at}/me/kernel"},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Calls]:
    """Every request that reaches the server: its method's name, and what it holds."""
    received: Calls = []

    class Kaggle(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            name = self.path.rsplit("/", 1)[-1]
            received.append((name, body if name == "upload" else json.loads(body)))
            at = f"http://localhost:{self.server.server_port}"  # type: ignore[attr-defined]
            answer = json.dumps(ANSWERS.get(name, {})).replace("{at}", at).encode()
            self.send_response(REFUSED.get(name, 200))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_PUT = do_POST

        def log_message(self, *_: Any) -> None:
            """Nothing: what came is in `received`."""

    server = ThreadingHTTPServer(("localhost", 0), Kaggle)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in (("USERNAME", "me"), ("KEY", "0"), ("CONFIG_DIR", str(tmp_path))):
        monkeypatch.setenv(f"KAGGLE_{name}", value)
    from kagglesdk import kaggle_http_client

    at = f"http://localhost:{server.server_port}"
    monkeypatch.setattr(kaggle_http_client, "get_endpoint", lambda _: at)
    yield received
    server.shutdown()
    server.server_close()


@pytest.fixture
def client(calls: Calls) -> Any:
    from kaggle.api.kaggle_api_extended import KaggleApi  # reads the environment

    client = KaggleApi()
    client.authenticate()
    return client


def test_it_pushes_the_kernel_and_the_wheels(client: Any, calls: Calls, tmp_path: Path) -> None:
    out, wanted = tmp_path / "out", ["--notebook", "04", "--profile", "t4", "--owner", "me"]
    told = CliRunner().invoke(cli.app, ["kaggle", "export", str(out), *wanted])
    assert told.exit_code == 0, told.output
    kernels = sorted(out.glob("polykv-04*"))
    assert len(kernels) == told.stdout.count("kaggle kernels push -p") > 0
    for folder in kernels:
        assert not client.kernels_push(str(folder)).error
    client.dataset_create_new(str(out / "polykv-lib-wheels"), quiet=True)

    pushed = [body for name, body in calls if name == "SaveKernel"]
    for folder, body in zip(kernels, pushed, strict=True):
        assert body["slug"] == f"me/{folder.name}"
        assert (body["machineShape"], body["enableGpu"]) == ("NvidiaTeslaT4", True)
        assert body["datasetDataSources"] == ["me/polykv-lib-wheels"]
        assert json.loads(body["text"])["cells"][1]["id"] == "install"
    [wheel] = out.glob("polykv-lib-wheels/*.whl")
    assert [body for name, body in calls if name == "upload"] == [wheel.read_bytes()]
    [(_, dataset)] = [call for call in calls if call[0] == "CreateDataset"]
    assert (dataset["slug"], dataset["files"]) == ("polykv-lib-wheels", [{"token": "blob"}])


def test_it_looks_at_what_it_is_given(
    client: Any, calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control: the client does look at what it is given."""
    about = {"id": "me/other", "title": "polykv 04", "code_file": "a.ipynb"}
    about |= {"language": "python", "kernel_type": "notebook"}
    (tmp_path / "a.ipynb").write_text("{}")
    (tmp_path / "kernel-metadata.json").write_text(json.dumps(about))
    client.kernels_push(str(tmp_path))
    assert "does not resolve to the specified" in capsys.readouterr().out
    (tmp_path / "kernel-metadata.json").write_text(json.dumps(about | {"model_sources": ["x/y"]}))
    with pytest.raises(ValueError, match="Model instance version must be"):
        client.kernels_push(str(tmp_path))
