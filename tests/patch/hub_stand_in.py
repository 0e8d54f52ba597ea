"""A hub on this machine: the two routes that a download uses, and the ways in which they go wrong."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEWER = "f" * 40


@dataclass
class Repo:
    """What the stand-in says about one repository."""

    files: dict[str, bytes]
    refs: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    sizes: dict[str, Any] = field(default_factory=dict)
    """Sizes that the listing states instead of the true ones."""
    info_status: int = 200
    file_status: int = 200
    redirect_to: str | None = None
    """Where the files really are: the address of another server."""
    info: bytes | None = None
    """The answer about the repository, instead of an honest one."""
    endless: bool = False
    """Files never end."""
    cut: bool = False
    """The connection closes in the middle of a file."""
    commit: str | None = None
    """The commit that the answer names, when not the true one."""


class HubStandIn:
    """Serves `repos` on a free port while it is open. `asked`: (method, path, Authorization) in order."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        self.sent = 0
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not self.path.startswith(("/api/models/", "/owner/")):
                    # The client's own questions, which are about no repository.
                    return _error(self, 404, "")
                stand_in.asked.append(("GET", self.path, self.headers.get("authorization")))
                return stand_in._answer(self)

            def do_HEAD(self) -> None:
                self.do_GET()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; connections are refused from then on."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def paths(self) -> list[str]:
        """The paths that were asked for."""
        return [urlsplit(path).path for _, path, _ in self.asked]

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        parts = [unquote(part) for part in urlsplit(handler.path).path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if api else parts
        repo = self.repos.get(f"{owner}/{name}")
        if repo is None:
            return _error(handler, 401, "RepoNotFound")
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repo.refs.get(revision, revision if revision in repo.refs.values() else None)
        if commit is None:
            return _error(handler, 404, "RevisionNotFound")
        if api:
            return self._info(handler, repo, commit)
        return self._file(handler, repo, commit, "/".join(rest[2:]))

    def _info(self, handler: BaseHTTPRequestHandler, repo: Repo, commit: str) -> None:
        if repo.info_status != 200:
            return _error(handler, repo.info_status, "")
        siblings = [
            {"rfilename": path, "size": repo.sizes.get(path, len(data))} for path, data in repo.files.items()
        ]
        answer = json.dumps({"id": "a/b", "sha": repo.commit or commit, "siblings": siblings}).encode()
        return _send(handler, 200, repo.info or answer, {"Content-Type": "application/json"})

    def _file(self, handler: BaseHTTPRequestHandler, repo: Repo, commit: str, path: str) -> None:
        if repo.redirect_to:
            return _send(handler, 302, b"", {"Location": repo.redirect_to + urlsplit(handler.path).path})
        if repo.file_status != 200 or path not in repo.files:
            return _error(handler, repo.file_status if repo.file_status != 200 else 404, "EntryNotFound")
        data = repo.files[path]
        headers = {"ETag": '"e"', "X-Repo-Commit": commit}
        if repo.endless:
            handler.send_response(200)
            handler.end_headers()
            try:
                while self.sent < 1 << 30:
                    self.sent += handler.wfile.write(bytes(1 << 16))
            except OSError:
                pass
            return None
        if repo.cut:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data[: len(data) // 2])
            return None
        return _send(handler, 200, data, headers)


def _error(handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
    _send(handler, status, b'{"error": "no \x1b[31m"}', {"X-Error-Code": code})


def _send(handler: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str]) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data)
