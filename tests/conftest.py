"""All tests share this: the project on sys.path, one thread, a tiny trained model, and an endpoint that misbehaves.

One thread because two test processes on two cores would otherwise crawl.
"""

import json
import os
import shutil
import signal
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def same_signals():
    """After each test Ctrl-C does what it did before: training in this process changes that."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Folder of an embedded model after a short warm start: it speaks the agents' formats, and is often wrong."""
    import train

    out = tmp_path_factory.mktemp("warm")
    train.make_embedded_model(str(out), train.Config(out=str(out), warm_steps=120))
    return out / "base"


@pytest.fixture(scope="session")
def long_base(base, tmp_path_factory):
    """The same model, made for as many positions as the full-size presets need."""
    folder = tmp_path_factory.mktemp("long") / "base"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40_960}))
    return folder


# ---- An endpoint for coaches -----------------------------------------------------------------------------------------


class Request(NamedTuple):
    """A request that the endpoint got."""

    path: str
    headers: dict
    body: dict


@dataclass(frozen=True)
class Status:
    """An entry of a script: answer with this HTTP status, these headers and this body (a good reply if it has none)."""

    code: int
    headers: dict = field(default_factory=dict)
    body: object = None  # is sent as JSON


OK = Status(200)


class Endpoint(ThreadingHTTPServer):
    """A chat endpoint that does what its script says, one entry a request; after the script it answers well.

    An entry is a Status, the number of one, the text of a reply, or the name of a trouble:
    "nothing" (the connection is closed without a byte), "hang" (no answer until the test is over),
    "half" (the body breaks off), "garbage" (no JSON), "empty" (JSON without a choice).
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Scripted)
        self.script = []
        self.seen = []  # a Request for each request, in order of arrival
        self.answer = lambda messages: "SCORE: 7"  # behind the script: messages -> an entry
        self.respond = None  # in place of both: Request -> an entry
        self.released = threading.Event()  # ends what hangs
        self.lock = threading.Lock()  # requests come in threads of their own

    def next_entry(self, request):
        """Note a request, and find out how to answer it."""
        with self.lock:
            self.seen.append(request)
            if self.respond:
                return self.respond(request)
            if self.script:
                return self.script.pop(0)
        return self.answer(request.body["messages"])


def api(endpoint, host="127.0.0.1", path="/v1", **options):
    """A coach behind an Endpoint."""
    from judge import ApiModel

    options = dict(key="sk-SECRET", concurrency=1) | options
    return ApiModel(f"http://{host}:{endpoint.server_port}{path}", "m", **options)


class Scripted(BaseHTTPRequestHandler):
    """Answers one request as the script of its Endpoint says."""

    def log_message(self, *_):
        """Print nothing."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        entry = self.server.next_entry(Request(self.path, dict(self.headers), json.loads(body)))
        troubles = {
            "nothing": self.send_nothing,
            "hang": self.hang,
            "half": self.send_half,
            "garbage": self.send_garbage,
            "empty": self.send_empty,
        }
        if isinstance(entry, int):
            self.send_status(Status(entry))
        elif isinstance(entry, Status):
            self.send_status(entry)
        elif entry in troubles:
            troubles[entry]()
        else:
            self.send(completion(entry))

    def send_nothing(self):
        """Leave: the connection closes behind this."""

    def hang(self):
        self.server.released.wait()

    def send_half(self):
        whole = completion("SCORE: 7")
        self.send(whole[:20], length=len(whole))

    def send_garbage(self):
        self.send(b"<html>")

    def send_empty(self):
        self.send(b'{"choices": []}')

    def send_status(self, status):
        """Without a body of its own it has a good reply all the same: who overlooks the status takes it for one."""
        body = completion("SCORE: 1") if status.body is None else json.dumps(status.body).encode()
        self.send(body, status)

    def send(self, body, status=OK, length=None):
        """Send a body. length: the one that the header claims, where it is not the true one."""
        self.send_response(status.code)
        for name, value in status.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)


def completion(text):
    """The body of a chat completion that took 7 tokens."""
    choice = dict(index=0, message=dict(role="assistant", content=text), finish_reason="stop")
    usage = dict(prompt_tokens=3, completion_tokens=4, total_tokens=7)
    content = dict(id="1", object="chat.completion", created=1, model="m", choices=[choice], usage=usage)
    return json.dumps(content).encode()


def as_they_end(sampler):
    """A scripted sampler, which returns its Completions in the order of the contexts, in place of rollout's."""

    def pairs(model, contexts, draws, max_new_tokens, temperature, **limits):
        return enumerate(sampler(model, contexts, draws, max_new_tokens, temperature))

    return pairs


@pytest.fixture
def endpoint():
    """A running Endpoint."""
    with Endpoint() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()
