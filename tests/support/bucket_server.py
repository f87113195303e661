"""A real S3 server on this machine (moto's), and one that answers as Google's, both with faults on the way to them."""

import collections
import contextlib
import io
import json
import logging
import os
import re
import threading
import urllib.parse

BUCKET = "bucket"


class Server:
    """Serves one bucket at a port of its own of 127.0.0.1.

    `fault` may be set to a function `(method, key) -> kind or None` with the kinds `503`, `500`, `403`, `hang up`,
    `half`, which sends half of what was asked for and hangs up, and `flip`, which turns one bit of it.
    """

    scheme = "s3"

    def __init__(self):
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.fault = lambda method, key: None
        self.requests = collections.Counter()
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.environ = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "a-key",
            "AWS_SECRET_ACCESS_KEY": "a-secret-that-nobody-prints",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def _answer(self, environ, start_response):
        method, key = environ["REQUEST_METHOD"], environ["PATH_INFO"].removeprefix(f"/{BUCKET}/")
        kind = self.fault(method, key)
        self.requests[method, kind] += 1
        if kind is None:
            return self._app(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if kind == "hang up":
            return self._hung_up(start_response, b"", 100)
        if kind in ("half", "flip"):
            told = []
            whole = b"".join(self._app(environ, lambda status, headers, *rest: told.append((status, headers))))
            if kind == "half":
                return self._hung_up(start_response, whole[: len(whole) // 2], len(whole))
            checked = ("x-amz-checksum", "etag")  # by which a client would find it
            start_response(told[0][0], [(n, v) for n, v in told[0][1] if not n.lower().startswith(checked)])
            return [whole[:-1] + bytes([whole[-1] ^ 1])]
        code = {"503": "SlowDown", "500": "InternalError", "403": "AccessDenied"}[kind]
        body = f"<Error><Code>{code}</Code><Message>{code} on purpose</Message></Error>".encode()
        start_response(f"{kind} {code}", [("Content-Type", "text/xml"), ("Content-Length", str(len(body)))])
        return [body]

    @staticmethod
    def _hung_up(start_response, content, length):
        start_response("200 OK", [("Content-Length", str(length))])
        yield content
        raise ConnectionResetError

    def stop(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Broken:
    """A fault that hits as many of the requests that are meant, from now on."""

    def __init__(self, kind, methods, count=10**9, named=""):
        self.kind, self.methods, self.left, self.named = kind, methods, count, named
        self.hits = 0

    def __call__(self, method, key):
        if method not in self.methods or self.named not in key or self.left <= 0:
            return None
        self.left -= 1
        self.hits += 1
        return self.kind


@contextlib.contextmanager
def serving():
    """A server with an empty bucket; the variables that lead to it are set meanwhile."""
    server = Server()
    before = {name: os.environ.get(name) for name in server.environ}
    os.environ.update(server.environ)
    try:
        import fsspec

        fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True).mkdir(BUCKET)
        yield server
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        server.stop()


class GoogleServer:
    """A server that answers as Google's, in memory and with an empty bucket.

    `fault` is as that of `Server`; an object that is being written is a `PUT` here, too.
    """

    scheme = "gs"
    attempts = 6
    """How often gcsfs tries, which cannot be told otherwise."""

    def __init__(self):
        from gcp_storage_emulator.server import create_server

        logging.getLogger("gcp_storage_emulator").setLevel(logging.ERROR)
        self._server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
        self.fault = lambda method, key: None
        self.requests = collections.Counter()
        self._server.start()
        web = self._server._api._httpd
        web.RequestHandlerClass = _faulty(web.RequestHandlerClass, self)
        self.environ = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{web.server_port}"}

    def stop(self):
        self._server.stop()


def _faulty(made, google):
    """The emulator's handler of requests, with the faults of a server."""
    base, storage = made.func, made.args[0]

    class Handler(base):
        def __init__(self, *args):
            super().__init__(storage, *args)

        def parse_request(self):
            if not super().parse_request():
                return False
            path = urllib.parse.urlsplit(self.path).path
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.rfile, self.close_connection = io.BytesIO(body), True
            method, name = self.command, path.rpartition("/o/")[2]
            if path.startswith("/upload"):
                method, name = "PUT", (re.findall(rb'"name": *"([^"]+)"', body) or [b""])[0].decode()
            elif "/rewriteTo/" in path:
                method = "PUT"
            kind = google.fault(method, urllib.parse.unquote(name))
            google.requests[method, kind] += 1
            if kind is None:
                return True
            if kind in ("half", "flip"):
                real, self.wfile = self.wfile, io.BytesIO()
                getattr(self, f"do_{self.command}")()
                head, _, content = self.wfile.getvalue().partition(b"\r\n\r\n")
                self.wfile = real
                content = content[: len(content) // 2] if kind == "half" else content[:-1] + bytes([content[-1] ^ 1])
                self.wfile.write(head + b"\r\n\r\n" + content)
            elif kind != "hang up":
                body = json.dumps({"error": {"code": int(kind), "message": f"{kind} on purpose"}}).encode()
                self.send_response(int(kind))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            return False

    return Handler


@contextlib.contextmanager
def serving_google():
    """A server for `gs://`; the variable that leads to it is set meanwhile."""
    server = GoogleServer()
    os.environ.update(server.environ)
    try:
        yield server
    finally:
        del os.environ["STORAGE_EMULATOR_HOST"]
        server.stop()
