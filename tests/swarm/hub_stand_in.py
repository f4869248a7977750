"""A stand-in for the Hugging Face Hub: takes repositories and commits, keeps what came."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """Serves on loopback while it is entered.

    Args:
        token: what a writer must send; others are refused.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.summary = ""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Authorization") != f"Bearer {hub.token}":
                    self._answer(401, {"error": "Invalid username or password."})
                else:
                    self._answer(200, hub.answer(self.path, body))

            def _answer(self, status: int, value: dict[str, Any]) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.url}/me/sums", "name": "me/sums"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path.startswith("/api/models/me/sums/preupload/"):
            files = json.loads(body)["files"]
            return {
                "files": [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in files
                ]
            }
        if path.startswith("/api/models/me/sums/commit/"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.summary = line["value"]["summary"]
                else:
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {"commitUrl": f"{self.url}/me/sums/commit/0", "commitOid": "0" * 40}
        raise AssertionError(path)
