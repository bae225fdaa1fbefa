"""Requests as bytes, over sockets of our own: what no HTTP client would send."""

import contextlib
import json
import re
import socket
import struct
import time

import psutil

PATIENCE_S = 120


def connect(url, rcvbuf=None):
    """A connection to a server."""
    host, port = url.removeprefix("http://").split(":")
    sock = socket.socket()
    if rcvbuf:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    sock.settimeout(PATIENCE_S)
    sock.connect((host, int(port)))
    return sock


def get(path="/health", version="1.1", *headers):
    """The bytes of a GET."""
    return _head(f"GET {path} HTTP/{version}", "host: x", *headers)


def post(body, path="/v1/completions", version="1.1", *headers):
    """The bytes of a POST with a JSON body."""
    content = json.dumps(body).encode()
    own = ("host: x", "content-type: application/json", f"content-length: {len(content)}")
    return _head(f"POST {path} HTTP/{version}", *own, *headers) + content


def _head(*lines):
    return "\r\n".join([*lines, "", ""]).encode()


def read_all(sock):
    """Until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def answer_to(url, request):
    """All that a server says to some bytes, until it closes."""
    with connect(url) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(request)
        return read_all(sock)


def statuses(answer):
    """Of all responses in it, but for interim ones."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", answer)]


def read_quietly(sock):
    """`read_all`, for a thread whose socket is closed meanwhile."""
    with contextlib.suppress(OSError):
        read_all(sock)


def reset(sock):
    """Close with a reset, as a process that died with data unread."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def wait_until_hung_up(sock):
    """Until the server, which runs in this process, has closed its end; nothing is read meanwhile."""
    port = sock.getsockname()[1]
    process = psutil.Process()
    wait_for(lambda: not any(end.raddr and end.raddr.port == port for end in process.net_connections("tcp")))


def is_closed(sock):
    """Whether the server has closed it; reads what there is."""
    sock.setblocking(False)
    try:
        while sock.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def flood(url, begin, chunk, limit=64 * 2**20):
    """Send `begin`, then `chunk` again and again, until the server closes or `limit` bytes are sent: how many were, and
    what the server said."""
    with connect(url) as sock:
        sock.sendall(begin)
        num_sent = 0
        sock.settimeout(20)
        try:
            while num_sent < limit:
                num_sent += sock.send(chunk)
        except (ConnectionError, TimeoutError):
            pass
        sock.settimeout(PATIENCE_S)
        return num_sent, read_all(sock)


def wait_for(condition, patience_s=PATIENCE_S):
    """Until a condition holds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
