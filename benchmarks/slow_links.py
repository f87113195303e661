"""Hosts on this machine, as network namespaces, joined by links of a given bandwidth and latency. Needs root.

A link without latency is a virtual cable that the kernel's token bucket limits. Latency takes a relay, since not every
kernel has a queue that delays: a process that takes packets from one host, and hands them to another one later.
"""

import collections
import contextlib
import fcntl
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
import uuid
from typing import NamedTuple

FRAME = 1538 / 1448
"""What a payload of TCP takes on an Ethernet link, with frames of 1,500 bytes."""
PACKET = 32_000
"""Bytes of a packet that the relay carries: small ones would cost it more time than the link."""
QUEUE_BYTES = 4_000_000
"""What waits for the link; what comes on top is lost, as in a switch."""
PINGS = 100
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001


def address(host: int) -> str:
    return f"10.79.0.{host + 1}"


@contextlib.contextmanager
def hosts(number: int, bits_per_second: float, latency: float):
    """Makes hosts; the value is, for each, the words that let a command run there.

    Args:
      bits_per_second: of each host's link, in either direction.
      latency: seconds from one host to another.
    """
    mark = uuid.uuid4().hex[:6]
    spaces = [f"tfdist-{mark}-{host}" for host in range(number)]
    relay = None
    try:
        for space in spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        if latency:
            relay = _relay(mark, spaces, bits_per_second, latency)
        else:
            _switch(mark, spaces, bits_per_second)
        for host, space in enumerate(spaces):
            _ip("-n", space, "addr", "add", f"{address(host)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
        yield [["ip", "netns", "exec", space] for space in spaces]
    finally:
        if relay is not None:
            relay.terminate()
            relay.wait()
        for space in (*spaces, f"tfdist-{mark}-switch"):
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)


class Measured(NamedTuple):
    """A link as its users see it."""

    bytes_per_second: float
    """Of a plain TCP stream."""
    latency: float
    """Half of what an answer to a few bytes takes, in seconds."""


def measured(where: list[list[str]], size: int) -> Measured:
    """Measures the way from the first host to the second with `size` bytes, while nothing else uses it."""
    words = [sys.executable, __file__]
    server = subprocess.Popen([*where[1], *words, "answer", address(1)], stdout=subprocess.PIPE, text=True)
    port = server.stdout.readline().strip()
    asked = subprocess.run(
        [*where[0], *words, "ask", address(1), port, str(size)], stdout=subprocess.PIPE, text=True, check=True
    )
    server.wait()
    return Measured(*map(float, asked.stdout.split()))


def _answer(host: str) -> None:
    """Answers bytes one by one, and then a stream when it has come to its end."""
    with socket.create_server((host, 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(PINGS):
                connection.sendall(connection.recv(1))
            while connection.recv(1 << 20):
                pass
            connection.sendall(b"x")


def _ask(host: str, port: int, size: int) -> None:
    with socket.create_connection((host, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        took = []
        for _ in range(PINGS):
            begun = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            took.append(time.perf_counter() - begun)
        there_and_back = statistics.median(took)
        begun = time.perf_counter()
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        print(size / (time.perf_counter() - begun - there_and_back), there_and_back / 2)


def _switch(mark: str, spaces: list[str], bits_per_second: float) -> None:
    """Joins hosts by a switch with a cable for each."""
    switch = f"tfdist-{mark}-switch"
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for host, space in enumerate(spaces):
        port = f"port{host}"
        _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
        _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        limit = ["tbf", "rate", f"{bits_per_second:.0f}bit", "burst", "256kb", "limit", str(QUEUE_BYTES)]
        _run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", "root", *limit)


def _relay(mark: str, spaces: list[str], bits_per_second: float, latency: float) -> subprocess.Popen:
    """Joins hosts by a relay."""
    names = [f"t{mark}{host}" for host in range(len(spaces))]
    words = [sys.executable, __file__, str(bits_per_second), str(latency), *names]
    relay = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    if relay.stdout.readline() != "ready\n":
        sys.exit("the relay has not started")
    for name, space in zip(names, spaces):
        _ip("link", "set", name, "netns", space)
        _ip("-n", space, "link", "set", name, "name", "eth0", "mtu", str(PACKET))
    return relay


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr.strip()}")


def main() -> None:
    """One of the processes that this module starts."""
    match sys.argv[1:]:
        case ["answer", host]:
            _answer(host)
        case ["ask", host, port, size]:
            _ask(host, int(port), int(size))
        case [rate, latency, *names]:
            _carry(float(rate), float(latency), names)


def _carry(rate: float, latency: float, names: list[str]) -> None:
    """The relay: `slow_links.py BITS_PER_SECOND LATENCY NAME...`, a tunnel for each host."""
    os.nice(-20)  # what is late here would be taken for the link's
    tunnels = [os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK) for _ in names]
    for tunnel, name in zip(tunnels, names):
        fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH", name.encode(), _TUN_WITHOUT_HEADER))
    print("ready", flush=True)
    free = dict.fromkeys(tunnels, 0.0)
    """When each link will have sent what waits for it."""
    late: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        now = time.perf_counter()
        late = collections.deque(sorted(late, key=lambda entry: entry[0])) if len(tunnels) > 2 else late
        while late and late[0][0] <= now:
            _, tunnel, packet = late.popleft()
            with contextlib.suppress(BlockingIOError, OSError):  # the host takes no more: lost
                os.write(tunnel, packet)
            now = time.perf_counter()
        wait = max(0.0, late[0][0] - now) if late else None
        for tunnel in select.select(tunnels, [], [], wait)[0]:
            with contextlib.suppress(BlockingIOError):
                packet = os.read(tunnel, 65_536)
                now = time.perf_counter()
                target = packet[19] - 1  # the last byte of the IPv4 address that it is for
                waits = max(0.0, free[tunnel] - now) * rate / 8
                if packet[0] >> 4 == 4 and 0 <= target < len(tunnels) and waits < QUEUE_BYTES:
                    free[tunnel] = max(free[tunnel], now) + len(packet) * FRAME * 8 / rate
                    late.append((free[tunnel] + latency, tunnels[target], packet))


if __name__ == "__main__":
    main()
