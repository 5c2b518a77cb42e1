"""An API server that a test can have fail: answers get lost, watches and credentials expire, Jobs are about to end.

It keeps what it is given, removes what a Job owned, and runs nothing. It stands for what the test bed cannot do at a
test's wish, or at all: Kubernetes 1.20 has no Jobs that are about to end.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

_PATH = re.compile(r"/(?:api|apis/batch)/v1/namespaces/default/(\w+)(?:/([\w.-]+))?(/log)?")
_DEADLINE_S = 30.0

Object = dict[str, Any]


class KubeApi:
    """Such a server.

    Attributes:
        tokens: Those that it takes.
        requests: What it was asked: "POST pods".
        minor: The server's version after "1.".
        unknown: What is no field's name. It is refused to those who ask for that, as by Kubernetes from 1.25 on.
    """

    def __init__(self) -> None:
        self.tokens = {"good"}
        self.requests: list[str] = []
        self.minor = "34"
        self.unknown: str | None = None
        self._objects: dict[tuple[str, str], Object] = {}
        self._failures: list[tuple[str, str | int]] = []
        self._events: list[Object] = []
        self._count = itertools.count(1)
        self._num_watches = 0
        self._is_closing = False
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        """End it."""
        with self._changed:
            self._is_closing = True
            self._num_watches += 1  # Whoever watches is told to come again.
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def write_config(self, file: Path, user: Object | None = None) -> None:
        """Write a kubeconfig for it."""
        server = f"http://127.0.0.1:{self._server.server_port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "clusters": [{"name": "it", "cluster": {"server": server}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me"}}],
            "users": [{"name": "me", "user": user or {"token": "good"}}],
        }
        file.write_text(json.dumps(config))

    def fail(self, request: str, how: str | int) -> None:
        """Have the next request of a kind fail: with an HTTP status, "lost" if only its answer is, or "hang"."""
        with self._changed:
            self._failures.append((request, how))

    def objects(self, kind: str) -> list[Object]:
        """Return what it has of a kind: "pods"."""
        with self._changed:
            return [json.loads(json.dumps(each)) for (of, _), each in self._objects.items() if of == kind]

    def change(self, kind: str, name: str, **parts: Any) -> None:
        """Change an object, as the cluster does."""
        with self._changed:
            self._store(kind, self._objects[kind, name] | parts, "MODIFIED")

    def delete(self, kind: str, name: str, *, unseen: bool = False) -> None:
        """Remove an object, with what it owns; those who watch may not be told."""
        with self._changed:
            self._remove(kind, name, unseen)

    def expire_watches(self) -> None:
        """Forget what has happened: who watches has to begin anew."""
        with self._changed:
            self._num_watches += 1
            self._events.clear()
            self._changed.notify_all()

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Wait for what clients do."""
        ends_at = time.monotonic() + _DEADLINE_S
        with self._changed:
            while not is_true():
                assert self._changed.wait(0.05) or time.monotonic() < ends_at, self.requests

    def _store(self, kind: str, new: Object, event: str) -> Object:
        version = str(next(self._count))
        new["metadata"] = {**new["metadata"], "resourceVersion": version}
        self._objects[kind, new["metadata"]["name"]] = new
        self._tell(kind, event, new)
        return new

    def _tell(self, kind: str, event: str, what: Object) -> None:
        if kind == "pods":
            self._events.append({"type": event, "object": what})
        self._changed.notify_all()

    def _remove(self, kind: str, name: str, unseen: bool = False) -> None:
        gone = self._objects.pop((kind, name))
        if not unseen:
            version = str(next(self._count))
            self._tell(kind, "DELETED", gone | {"metadata": {**gone["metadata"], "resourceVersion": version}})
        for (of, dependent), each in list(self._objects.items()):
            owners = each["metadata"].get("ownerReferences") or ()
            if any(owner["uid"] == gone["metadata"]["uid"] for owner in owners):
                self._remove(of, dependent, unseen)

    def _do(self, method: str, kind: str, name: str, body: Object, *, is_trial: bool) -> tuple[int, Object]:
        """Do what a request says; returns the answer."""
        key = (kind, name or body.get("metadata", {}).get("name", ""))
        if method == "POST":
            if key in self._objects:
                return 409, {"message": f'{kind} "{key[1]}" already exists'}
            if is_trial:
                return 201, body
            uid = f"uid-{next(self._count)}"
            created = self._store(kind, body | {"metadata": body["metadata"] | {"uid": uid}}, "ADDED")
            owners = {owner["uid"] for owner in body["metadata"].get("ownerReferences") or ()}
            if owners and owners.isdisjoint(each["metadata"]["uid"] for each in self._objects.values()):
                self._remove(*key)
            return 201, created
        if not name:
            items = [each for (of, _), each in self._objects.items() if of == kind]
            return 200, {"metadata": {"resourceVersion": str(next(self._count))}, "items": items}
        if key not in self._objects:
            return 404, {"message": f'{kind} "{name}" not found'}
        if method == "PATCH":
            spec = self._objects[key]["spec"] | body["spec"]
            return 200, self._store(kind, self._objects[key] | {"spec": spec}, "MODIFIED")
        self._remove(kind, name)
        return 200, {"status": "Success"}

    def _answer(self, method: str, path: str, body: Object, *, is_trial: bool) -> tuple[int, Object] | None:
        """Do what a request says, unless it only tries; returns the answer, or None if that is lost."""
        if path == "/version":
            return 200, {"major": "1", "minor": self.minor}
        if path.endswith("selfsubjectaccessreviews"):
            return 201, {"status": {"allowed": True}}
        match = _PATH.fullmatch(path)
        if match is None or match[3]:
            return 404, {"message": f"{path} not found"}
        with self._changed:
            request = f"{'TRY' if is_trial else method} {match[1]}"
            self.requests.append(request)
            self._changed.notify_all()
            how = next((how for wanted, how in self._failures if wanted == request), None)
            if how is not None:
                self._failures.remove((request, how))
            if how == "hang":
                self._changed.wait_for(lambda: self._is_closing, _DEADLINE_S)
                return None
            if isinstance(how, int):
                return how, {"message": f"{request} fails with {how}"}
            answer = self._do(method, match[1], match[2] or "", body, is_trial=is_trial)
            return None if how == "lost" else answer

    def _watch(self, since: int) -> Iterator[Object]:
        """Return what happens, as it happens, until it is forgotten."""
        with self._changed:
            self.requests.append("WATCH pods")
            self._changed.notify_all()
            mine, told = self._num_watches, since
        while True:
            with self._changed:
                while self._num_watches == mine and self._newest() <= told:
                    self._changed.wait()
                is_forgotten = self._num_watches != mine
                events = [each for each in self._events if _version(each) > told]
                told = max(told, self._newest())
            if is_forgotten:
                yield {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
                return
            yield from events

    def _newest(self) -> int:
        return max(map(_version, self._events), default=0)

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):  # Clients end as they like.
                    super().handle()

            def serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                url = urlsplit(self.path)
                query = parse_qs(url.query)
                if self.headers.get("Authorization", "").removeprefix("Bearer ") not in api.tokens:
                    self.say(401, {"message": "Unauthorized"})
                elif query.get("fieldValidation") == ["Strict"] and f'"{api.unknown}":'.encode() in body:
                    self.say(400, {"message": f'strict decoding error: unknown field "spec.{api.unknown}"'})
                elif "watch" in query:
                    self.stream(int(query["resourceVersion"][0]))
                else:
                    is_trial = query.get("dryRun") == ["All"]
                    answer = api._answer(self.command, url.path, json.loads(body or b"{}"), is_trial=is_trial)
                    if answer is None:
                        self.close_connection = True
                    else:
                        self.say(*answer)

            do_GET = do_POST = do_PATCH = do_DELETE = serve  # noqa: N815 - the names that http.server knows

            def say(self, status: int, answer: Object) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def stream(self, since: int) -> None:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for event in api._watch(since):
                    line = json.dumps(event).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - http.server's name
                """Say nothing."""

        return Handler


def _version(event: Object) -> int:
    return int(event["object"]["metadata"]["resourceVersion"])
