"""Shared by all tests: the project on sys.path, one thread (two test processes on two cores would crawl), a tiny base."""
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Folder of an embedded model after a short warm start: it speaks the agents' formats, and is often wrong."""
    import train

    out = tmp_path_factory.mktemp("warm")
    train.embedded_model(train.Config(out=str(out), warm_steps=120))
    return out / "base"


class Scripted(BaseHTTPRequestHandler):
    """An endpoint that does what the script of its server says, one entry a request; then it answers well."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, dict(self.headers), json.loads(body)))
        act = self.server.script.pop(0) if self.server.script else self.server.answer(self.server.seen[-1][2]["messages"])
        if act == "nothing":
            return
        if act == "hang":
            self.server.released.wait(5)
            return
        status, headers = (act, {}) if isinstance(act, int) else act if isinstance(act, tuple) else (200, {})
        choice = dict(index=0, message=dict(role="assistant", content=act), finish_reason="stop")
        out = json.dumps(dict(id="1", object="chat.completion", created=1, model="m", choices=[choice],
                              usage=dict(prompt_tokens=3, completion_tokens=4, total_tokens=7))).encode()  # fmt: skip
        out = b"<html>" if act == "garbage" else b'{"choices": []}' if act == "empty" else out
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(out)))
        self.end_headers()
        self.wfile.write(out[:20] if act == "half" else out)


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.script, server.seen, server.released = [], [], threading.Event()
    server.answer = lambda messages: "SCORE: 7"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.released.set()
    server.shutdown()
