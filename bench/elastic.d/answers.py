"""Clouds with prepared answers, so that the reconciler is timed and not the simulator.

Each runs in a process of its own on the loopback interface. The first caches the answers of one of Shoal's simulators,
the second serves EC2's pages of instances.
"""

from __future__ import annotations

import multiprocessing
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any, ClassVar

Answer = tuple[str, bytes]
"""A content type and a body."""
_NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
_TOKEN = "page-{}"
_INSTANCE = """\
<item><reservationId>r-{number}</reservationId><ownerId>111122223333</ownerId><groupSet/><instancesSet><item>
<instanceId>{id}</instanceId><imageId>ami-0123456789abcdef0</imageId><instanceState><code>16</code><name>running</name>
</instanceState><privateDnsName>{dns}</privateDnsName><dnsName/><amiLaunchIndex>0</amiLaunchIndex>
<instanceType>g5.xlarge</instanceType><launchTime>{launched}</launchTime><placement>
<availabilityZone>us-east-1a</availabilityZone><groupName/><tenancy>default</tenancy></placement><monitoring>
<state>disabled</state></monitoring><subnetId>subnet-0123456789abcdef0</subnetId><vpcId>vpc-0123456789abcdef0</vpcId>
<privateIpAddress>{ip}</privateIpAddress><architecture>x86_64</architecture><rootDeviceType>ebs</rootDeviceType>
<rootDeviceName>/dev/sda1</rootDeviceName><tagSet>{tags}</tagSet><networkInterfaceSet><item>
<networkInterfaceId>eni-{number}</networkInterfaceId><status>in-use</status><privateIpAddress>{ip}</privateIpAddress>
<privateDnsName>{dns}</privateDnsName><attachment><deviceIndex>0</deviceIndex><networkCardIndex>0</networkCardIndex>
<status>attached</status></attachment><privateIpAddressesSet><item><privateIpAddress>{ip}</privateIpAddress>
<primary>true</primary></item></privateIpAddressesSet></item></networkInterfaceSet></item></instancesSet></item>"""
"""A subset of what EC2 reports; clustermgtd reads no more."""


@contextmanager
def cached_cloud(url: str, cacheable: str) -> Iterator[str]:
    """The address of a proxy of the cloud at `url` that caches answers.

    `cacheable` is a regular expression for `METHOD /path`.
    """
    parts = urllib.parse.urlsplit(url)
    with _serve_in_process(_CachingHandler, f"{parts.scheme}://{parts.netloc}", cacheable) as address:
        yield address + parts.path


@contextmanager
def ec2(pages: Sequence[bytes]) -> Iterator[str]:
    """The address of an EC2 with these pages of instances, all healthy, that rejects all other requests."""
    with _serve_in_process(_Ec2Handler, tuple(pages)) as address:
        yield address


def ec2_pages(instances: Sequence[Mapping[str, str]], cluster: str, size: int = 1000) -> list[bytes]:
    """Answers of DescribeInstances with `size` instances each, every instance in its own reservation."""
    pages = []
    for start in range(0, len(instances), size):
        rows = "".join(_instance(instance, cluster) for instance in instances[start : start + size])
        more = start + size < len(instances)
        token = f"<nextToken>{_TOKEN.format(start // size + 1)}</nextToken>" if more else ""
        pages.append(_xml("DescribeInstances", f"<reservationSet>{rows}</reservationSet>{token}"))
    return pages


def _instance(instance: Mapping[str, str], cluster: str) -> str:
    tags = {
        "parallelcluster:cluster-name": cluster,
        "parallelcluster:node-type": "Compute",
        "parallelcluster:queue-name": "burst",
        "parallelcluster:compute-resource-name": "gpu",
        "Name": "Compute",
    }
    tag_items = "".join(f"<item><key>{key}</key><value>{value}</value></item>" for key, value in tags.items())
    return _INSTANCE.format(
        **instance, dns=f"ip-{instance['ip'].replace('.', '-')}.ec2.internal", number=instance["id"][2:], tags=tag_items
    )


def _xml(action: str, inner: str) -> bytes:
    head = f'<?xml version="1.0" encoding="UTF-8"?>\n<{action}Response xmlns="{_NAMESPACE}">'
    return f"{head}<requestId>0</requestId>{inner}</{action}Response>".encode()


@contextmanager
def _serve_in_process(handler: type[BaseHTTPRequestHandler], *settings: Any) -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(handler, settings, theirs), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


def _serve(handler: type[BaseHTTPRequestHandler], settings: tuple[Any, ...], pipe: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, *settings))
    pipe.send(server.server_address[1])
    server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one packet

    def answer(self, status: int, answer: Answer) -> None:
        self.send_response(status)
        self.send_header("Content-Type", answer[0])
        self.send_header("Content-Length", str(len(answer[1])))
        self.end_headers()
        self.wfile.write(answer[1])
        self.wfile.flush()

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class _CachingHandler(_Handler):
    cache: ClassVar[dict[str, Answer]] = {}

    def __init__(self, origin: str, cacheable: str, *arguments: Any) -> None:
        self.origin, self.cacheable = origin, cacheable
        super().__init__(*arguments)

    def do_GET(self) -> None:
        answer = self.cache.get(self.path) or self._forward()
        if re.fullmatch(self.cacheable, f"GET {urllib.parse.urlsplit(self.path).path}"):
            self.cache[self.path] = answer
        self.answer(200, answer)

    def do_POST(self) -> None:
        self.answer(200, self._forward(self.body()))

    def _forward(self, body: bytes | None = None) -> Answer:
        headers = {key: self.headers[key] for key in ("Authorization", "Content-Type") if key in self.headers}
        request = urllib.request.Request(self.origin + self.path, body, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.headers["Content-Type"], answer.read()


class _Ec2Handler(_Handler):
    def __init__(self, pages: Sequence[bytes], *arguments: Any) -> None:
        self.pages = pages
        super().__init__(*arguments)

    def do_POST(self) -> None:
        request = dict(urllib.parse.parse_qsl(self.body().decode()))
        if request["Action"] == "DescribeInstances":
            page = int(request.get("NextToken", _TOKEN.format(0)).rpartition("-")[2])
            self.answer(200, ("text/xml", self.pages[page]))
        elif request["Action"] == "DescribeInstanceStatus":
            self.answer(200, ("text/xml", _xml(request["Action"], "<instanceStatusSet/>")))
        else:
            error = f"<Error><Code>UnsupportedOperation</Code><Message>{request['Action']}</Message></Error>"
            body = f"<Response><Errors>{error}</Errors><RequestID>0</RequestID></Response>"
            self.answer(400, ("text/xml", body.encode()))
