"""Clouds whose answers lie ready, so that what is timed is the reconciler and not a simulator's work for it.

Each runs in a process of its own and answers on a socket of the loopback. One remembers what a simulator of Shoal's has
answered to each question, the other has EC2's pages of instances.
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
"""Less than EC2 says of one, and all that clustermgtd reads."""


@contextmanager
def remembered(url: str, lasting: str) -> Iterator[str]:
    """The address of a cloud that has the one at `url` answer, and remembers what it says to lasting questions.

    These are `METHOD /path`, as a regular expression.
    """
    parts = urllib.parse.urlsplit(url)
    with _served(_Remembering, f"{parts.scheme}://{parts.netloc}", lasting) as address:
        yield address + parts.path


@contextmanager
def ec2(pages: Sequence[bytes]) -> Iterator[str]:
    """The address of an EC2 that has these pages of instances, all healthy, and refuses whatever else it is asked."""
    with _served(_Ec2, tuple(pages)) as address:
        yield address


def ec2_pages(instances: Sequence[Mapping[str, str]], cluster: str, size: int = 1000) -> list[bytes]:
    """DescribeInstances of so many instances a page, each in a reservation, as a fleet of single launches has them."""
    pages = []
    for start in range(0, len(instances), size):
        rows = "".join(_instance(one, cluster) for one in instances[start : start + size])
        more = start + size < len(instances)
        token = f"<nextToken>{_TOKEN.format(start // size + 1)}</nextToken>" if more else ""
        pages.append(_xml("DescribeInstances", f"<reservationSet>{rows}</reservationSet>{token}"))
    return pages


def _instance(one: Mapping[str, str], cluster: str) -> str:
    tags = {
        "parallelcluster:cluster-name": cluster,
        "parallelcluster:node-type": "Compute",
        "parallelcluster:queue-name": "burst",
        "parallelcluster:compute-resource-name": "gpu",
        "Name": "Compute",
    }
    shown = "".join(f"<item><key>{key}</key><value>{value}</value></item>" for key, value in tags.items())
    return _INSTANCE.format(
        **one, dns=f"ip-{one['ip'].replace('.', '-')}.ec2.internal", number=one["id"][2:], tags=shown
    )


def _xml(action: str, inner: str) -> bytes:
    head = f'<?xml version="1.0" encoding="UTF-8"?>\n<{action}Response xmlns="{_NAMESPACE}">'
    return f"{head}<requestId>0</requestId>{inner}</{action}Response>".encode()


@contextmanager
def _served(handler: type[BaseHTTPRequestHandler], *given: Any) -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(handler, given, theirs), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


def _serve(handler: type[BaseHTTPRequestHandler], given: tuple[Any, ...], pipe: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, *given))
    pipe.send(server.server_address[1])
    server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave together

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


class _Remembering(_Handler):
    known: ClassVar[dict[str, Answer]] = {}

    def __init__(self, origin: str, lasting: str, *arguments: Any) -> None:
        self.origin, self.lasting = origin, lasting
        super().__init__(*arguments)

    def do_GET(self) -> None:
        known = self.known.get(self.path) or self._ask()
        if re.fullmatch(self.lasting, f"GET {urllib.parse.urlsplit(self.path).path}"):
            self.known[self.path] = known
        self.answer(200, known)

    def do_POST(self) -> None:
        self.answer(200, self._ask(self.body()))

    def _ask(self, body: bytes | None = None) -> Answer:
        passed = {key: self.headers[key] for key in ("Authorization", "Content-Type") if key in self.headers}
        asked = urllib.request.Request(self.origin + self.path, body, passed)
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return answer.headers["Content-Type"], answer.read()


class _Ec2(_Handler):
    def __init__(self, pages: Sequence[bytes], *arguments: Any) -> None:
        self.pages = pages
        super().__init__(*arguments)

    def do_POST(self) -> None:
        asked = dict(urllib.parse.parse_qsl(self.body().decode()))
        if asked["Action"] == "DescribeInstances":
            wanted = int(asked.get("NextToken", _TOKEN.format(0)).rpartition("-")[2])
            self.answer(200, ("text/xml", self.pages[wanted]))
        elif asked["Action"] == "DescribeInstanceStatus":
            self.answer(200, ("text/xml", _xml(asked["Action"], "<instanceStatusSet/>")))
        else:
            error = f"<Error><Code>Refused</Code><Message>{asked['Action']}</Message></Error>"
            whole = f"<Response><Errors>{error}</Errors><RequestID>0</RequestID></Response>"
            self.answer(400, ("text/xml", whole.encode()))
