"""A Hugging Face Hub of our own on this machine, whose repositories are folders."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
_PROGRAM = """
import sys
from pat_jax.common import hub
from pat_jax.common.errors import UserError
assert "jax" not in sys.modules and "huggingface_hub" not in sys.modules
for expression in sys.argv[1:]:
    try:
        print(eval(expression))
    except UserError as error:
        print(f"error: {error}")
"""


@dataclass
class Hub:
    """Models are in `root/OWNER/NAME`, datasets in `root/datasets/OWNER/NAME`."""

    root: Path
    gated: set[str] = field(default_factory=set)
    served: list[str] = field(default_factory=list)  # files that were downloaded
    endpoint: str = ""
    # What is answered for a repository in the place of its files; None: nothing at all.
    answers: dict[str, tuple[int, bytes] | None] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)

    def ask(self, cache: Path, *expressions: str, **env: str) -> list[str]:
        """What expressions of `hub` give, in a process whose client knows this Hub."""
        ours = {"HF_ENDPOINT": self.endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-W", "error", "-c", _PROGRAM, *expressions]
        done = subprocess.run(
            command, env=os.environ | ours | env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    hub = Hub(root)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        hub.ended.set()
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[0] == "api"
        parts = [part for part in parts[is_api:] if part != "models"]
        size = 3 if parts[0] == "datasets" else 2
        name, rest = "/".join(parts[:size]), parts[size:]
        if name in self.hub.answers:
            answer = self.hub.answers[name]
            if answer is None:
                self.hub.ended.wait(60)
                return None
            return self._answer(answer[1], answer[0])
        folder = self.hub.root / name
        if not folder.is_dir():
            return self._refuse(401, "RepoNotFound")
        if len(rest) > 1 and rest[1] not in ("main", SHA):
            return self._refuse(404, "RevisionNotFound")
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.*")}
        if is_api:
            content = [self._entry(*each) for each in files.items()]
            if not rest or rest[0] != "tree":
                content = {"id": name, "sha": SHA, "siblings": [{"rfilename": x} for x in files]}
            return self._answer(json.dumps(content).encode())
        if name in self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if self.command == "GET":
            self.hub.served.append("/".join(rest[2:]))
        return self._answer(files["/".join(rest[2:])].read_bytes())

    def _entry(self, name: str, path: Path) -> dict[str, object]:
        return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _tag(path)}

    def _refuse(self, status: int, code: str) -> None:
        self._answer(b"", status, {"X-Error-Code": code})

    def _answer(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None):
        self.send_response(status)
        tag = hashlib.sha1(content).hexdigest()
        own = {"Content-Length": str(len(content)), "X-Repo-Commit": SHA, "ETag": f'"{tag}"'}
        for key, value in (own | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _tag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
