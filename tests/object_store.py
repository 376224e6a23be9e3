"""A real S3 server on loopback, moto's, whose requests can be made to fail."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

#: Of a request's method and path, whether it is to fail.
Failing = Callable[[str, str], bool]
BUCKET = "bucket"


class ObjectStore:
    """What a test sees of the server."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, str]] = []
        self.fails: Failing = lambda method, path: False
        self.spoil: Failing = lambda method, path: False
        """Of a PUT, whether its last byte is lost on the way."""
        self.lists_nothing = False
        """Whether listings are answered as before anything was written."""

    def environment(self) -> dict[str, str]:
        """What tells llmscale and its libraries of it; their own silent retries are off."""
        return {
            "S3_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
            # What is lost is to be found by llmscale, not by a checksum of the client.
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        }

    @functools.cached_property
    def client(self) -> Any:
        import boto3

        return boto3.session.Session("testing", "testing", region_name="us-east-1").client("s3", endpoint_url=self.url)

    def put(self, name: str, contents: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=name, Body=contents)

    def files(self, prefix: str = "") -> dict[str, bytes]:
        """Everything below a prefix, by the name behind it."""
        client = self.client
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        names = [actual["Key"] for page in pages for actual in page.get("Contents", [])]
        return {name.removeprefix(prefix): client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}


@contextmanager
def serve_objects() -> Iterator[ObjectStore]:
    """Serve an empty bucket. Clients in this process read boto3's descriptions and its list of services once."""
    from botocore.loaders import JSONFileLoader, Loader
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    store = ObjectStore()
    application = DomainDispatcherApplication(create_backend_app)
    # moto checks a condition and writes in two steps.
    is_writing = threading.Lock()

    def answer(environ: dict[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
        request = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        store.requests.append(request)
        if store.fails(*request):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("500 Internal Server Error", [("Content-Length", "0")])
            return []
        if request[0] == "PUT" and store.spoil(*request):
            import io

            contents = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))[:-1]
            environ |= {"wsgi.input": io.BytesIO(contents), "CONTENT_LENGTH": str(len(contents))}
            environ.pop("HTTP_CONTENT_MD5", None)
        if store.lists_nothing and request[0] == "GET" and request[1].strip("/") == BUCKET:
            environ["QUERY_STRING"] = re.sub(r"prefix=[^&]*", "prefix=nothing", environ["QUERY_STRING"])
        is_conditional = request[0] == "PUT" and {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"} & environ.keys()
        with is_writing if is_conditional else nullcontext():
            answered: Iterable[bytes] = application(environ, start)
        return answered

    class Quiet(WSGIRequestHandler):
        def log(self, *_: object) -> None:
            pass

    server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=Quiet)
    store.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    load, services = functools.cache(JSONFileLoader().load_file), functools.cache(Loader().list_available_services)
    try:
        with (
            mock.patch.object(JSONFileLoader, "load_file", lambda self, path: load(path)),
            mock.patch.object(Loader, "list_available_services", lambda self, type_name: services(type_name)),
        ):
            store.client.create_bucket(Bucket=BUCKET)
            yield store
    finally:
        server.shutdown()
        thread.join()
