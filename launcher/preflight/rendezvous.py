"""The nodes of a job meet before it starts: a coordinator on node 0, and links between pairs of nodes (R17.3, R17.4).

Plain TCP, lines of JSON. Every wait has a deadline. Imported only for a preflight.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator, Sequence

    Message = dict[str, Any]
    Problems = dict[int, str]

BEAT = 1.0  # seconds between two signs of life
SILENCE = 8.0  # seconds without one after which a node counts as lost; a round of links takes up to ROUND
SEND = 5.0  # seconds for a message; messages are smaller than a socket's buffer
ROUND = 3.0  # seconds for a pair of nodes, in which each sends up to 64 MiB
CONNECT = 2.0  # of them for the connection: the second SYN is sent after 1 s (RFC 6298)
GRACE = 1.0  # seconds that the coordinator waits longer than a node
LARGEST, FIRST = 1 << 20, 1 << 16  # bytes of a line, and of the first one, by which a node says who it is
STRANGERS = 64  # connections that have not said `hello`, beyond the number of nodes
CHUNK, WINDOW = 1 << 16, 16  # bytes of a block, and blocks over which bandwidth is measured: 1 MiB
LEAST, MOST = 64, 1024  # blocks that a node sends: 4 MiB, unless that takes SLOW, to 64 MiB
FAST, SLOW = 0.03, 0.6  # seconds
PINGS = 5
EVERY_PAIR = 8  # nodes up to which all pairs are measured
BUFFER = 1 << 19  # bytes of a socket's send buffer: what it takes at once is not yet sent
# Offsets in struct tcp_info of linux/tcp.h: total_retrans, segs_out.
TCP_INFO, RETRANSMITTED, SEGMENTS = 11, 100, 136


class Channel:
    """Send and receive messages over a connected socket.

    Attributes:
        began, seen: when it was connected, and something arrived last, by `time.monotonic`.
        hello: the first message of a node. waiting: kind of a message -> the last of that kind.
        lost: why the other side has gone; "" while it has not.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._rest = connection, b""
        connection.settimeout(SEND)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.seen = self.began = time.monotonic()
        self.lost = ""
        self.hello: Message = {}
        self.waiting: dict[str, Message] = {}
        self.fileno, self.close = connection.fileno, connection.close

    def address(self) -> str:
        """Return the address of the other side."""
        return str(self._socket.getpeername()[0])

    def send(self, **message: Any) -> None:
        """Send a message; sets `lost` if that fails."""
        try:
            if not self.lost:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            self.lost = reason(error)

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, once the socket is readable; sets `lost` at its end."""
        try:
            piece = self._socket.recv(65536)
            if not piece:
                raise OSError(0, "it has ended")
            self.seen = time.monotonic()
            *lines, self._rest = (self._rest + piece).split(b"\n")
            found = [json.loads(line) for line in lines]
            if len(self._rest) > (LARGEST if self.hello else FIRST) or not all(isinstance(one, dict) for one in found):
                raise ValueError("it sends something else than messages")
            return found
        except (OSError, ValueError, RecursionError) as error:
            self.lost = reason(error)
            return []


def readable(sources: Sequence[Any], seconds: float) -> list[Any]:
    """Return the sources that can be read, after `seconds` at most."""
    by_number = {source.fileno(): source for source in sources}
    poll = select.poll()  # select() ends with ValueError for descriptors from 1024 on
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(1000 * max(0.0, seconds))]


def is_node(hello: object) -> bool:
    """Return whether a message is what a node says about itself. Anyone on the network can connect."""
    if not isinstance(hello, dict):
        return False
    others = [value for name, value in hello.items() if name != "problems"]
    problems = hello.get("problems")
    return (
        type(hello.get("number")) is type(hello.get("port")) is int
        and isinstance(hello.get("host"), str)
        and isinstance(problems, list)
        and all(isinstance(one, (str, int, float, type(None))) for one in [*others, *problems])
    )


class Coordinator:
    """Collect a message of each of `count` nodes, which connect to the listener, and send all of them one."""

    def __init__(self, listener: socket.socket, count: int) -> None:
        self._listener, self._count, self._beaten = listener, count, 0.0
        self._unknown: list[Channel] = []
        self.members: dict[int, Channel] = {}
        self.strangers = 0  # connections that were dropped: they said something else, or nothing
        self._twice: Problems = {}

    def join(self, seconds: float, told: float) -> Problems:
        """Wait for every node, for `seconds` at most; after `told` seconds the nodes learn who is missing.

        Once two nodes have one number, wait for as many nodes as the job has, for `told` more seconds at most.
        Returns the problem of each node that is missing, or there twice.
        """
        began, due = time.monotonic(), told
        end = began + seconds
        while True:
            missing = [number for number in range(self._count) if number not in self.members]
            here = sum(bool(one.hello) for one in (*self.members.values(), *self._unknown))
            now = time.monotonic()
            if not missing or now > end or (self._twice and here >= self._count):
                return self._twice or dict.fromkeys(missing, f"did not join within {seconds:g} s")
            if self._twice:  # the nodes that are still to come shall learn of it, too
                end = min(end, now + told)
            elif now - began > due:
                due += 60.0
                self.send(missing=missing)
            self._step()
            # One that has gone may be restarted, and join again.
            self.members = {number: one for number, one in self.members.items() if not one.lost}

    def send(self, **message: Any) -> None:
        """Send a message to all nodes that are there."""
        for one in [*self.members.values(), *self._unknown]:
            one.send(**message)

    def gather(self, kind: str, seconds: float, what: str) -> tuple[dict[int, Message], Problems]:
        """Wait for a message of this kind from every node, for `seconds` at most, and GRACE after one says `failed`.

        Returns the messages, and the problem of each node that sent none.
        """
        end, failed = time.monotonic() + seconds, False
        while True:
            open_ = {number: one for number, one in self.members.items() if kind not in one.waiting}
            if not open_ or time.monotonic() > end or any(one.lost for one in open_.values()):
                break
            said = [one.waiting[kind][kind] for one in self.members.values() if kind in one.waiting]
            if not failed and any(isinstance(one, dict) and "failed" in one for one in said):
                failed, end = True, min(end, time.monotonic() + GRACE)
                self.send(failed=1)
            self._step()
        found = {number: one.waiting.pop(kind) for number, one in self.members.items() if kind in one.waiting}
        # A node that has gone makes others wait for it.
        gone = {number: f"{one.lost} while it {what}" for number, one in open_.items() if one.lost}
        return found, gone or dict.fromkeys(open_, f"{what} for more than {seconds:g} s")

    def _step(self) -> None:
        """Accept, receive, and notice silence; for a tenth of a second at most."""
        everyone = [one for one in (*self._unknown, *self.members.values()) if not one.lost]
        ready = readable([self._listener, *everyone], 0.1)
        if self._listener in ready:
            with contextlib.suppress(OSError):  # it has gone, or this process has as many files as it may
                self._unknown.append(Channel(self._listener.accept()[0]))
        now = time.monotonic()
        for one in everyone:
            if now - one.seen > SILENCE:
                one.lost = f"was silent for {SILENCE:g} s"
            for message in one.receive() if one in ready else []:
                if not one.hello and not self._enter(one, message.get("hello")):
                    break
                one.waiting.update({kind: {**message, "came": time.time()} for kind in message})
        silent = [one for one in self._unknown if not one.hello]
        excess = max(0, len(silent) - self._count - STRANGERS)
        for number, one in enumerate(silent):
            if one.lost or number < excess or now - one.began > SILENCE:
                one.lost = "no node of this job"
                one.close()
                self.strangers += 1
        self._unknown = [one for one in self._unknown if not one.lost and one not in self.members.values()]
        if time.monotonic() - self._beaten > BEAT:
            self._beaten = time.monotonic()
            self.send(beat=1)

    def _enter(self, one: Channel, hello: Message | None) -> bool:
        if not hello or not is_node(hello):
            one.lost = "no node of this job"
            return False
        number, host = hello["number"], hello["host"]
        one.hello, known = hello, self.members.get(number)
        if not 0 <= number < self._count:
            self._twice[number] = f"{host} has this number, but there are {self._count} nodes"
        elif known and not known.lost:
            self._twice[number] = f"there twice: {known.hello['host']} and {host} have this number"
        else:
            self.members[number] = one
        return True

    def close(self) -> None:
        """Wait until the nodes have read the last message, and close all connections.

        Closing a connection on which something unread has arrived would discard what was sent.
        """
        end = time.monotonic() + GRACE
        while time.monotonic() < end and not all(one.lost for one in (*self.members.values(), *self._unknown)):
            self._step()
        for one in [*self.members.values(), *self._unknown]:
            one.close()
        self._listener.close()


def listen(port: int) -> socket.socket:
    """Listen on a port of all interfaces; 0 for a free one. Raises OSError."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)


def reason(error: Exception) -> str:
    """Return what an error says, in a few words."""
    number = getattr(error, "errno", None) or 0
    return os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error) or type(error).__name__


def rounds(count: int) -> Iterator[int]:
    """Yield each k of the rounds in which node i is paired with node `i ^ k`: all pairs, or log2(count) of a node's."""
    k = 1
    while k < 1 << (count - 1).bit_length():
        yield k
        k += 1 if count <= EVERY_PAIR else k


def measure(number: int, peer: int, listener: socket.socket, address: str, port: int) -> Message:
    """Measure the link to another node, which does the same at the same time.

    The lower number connects to the address of the other, and sends first. Returns `latency` in seconds (of the lower
    number), `bandwidth` in bytes per second as this node receives, `retransmitted` and `segments` as this node sends;
    or `error`, why there is less than that.
    """
    end = time.monotonic() + ROUND
    found: Message = {}
    try:
        with _meet(number, peer, listener, address, port) as link:
            link.settimeout(ROUND)
            for sends in (True, False) if number < peer else (False, True):
                found.update(_pings(link, sends, end))
            for sends in (True, False) if number < peer else (False, True):
                if sends:
                    _stream(link, end)
                else:
                    found["bandwidth"] = _drain(link, end)
            link.sendall(b".")
            _receive(link, memoryview(bytearray(1)), end)  # all that this node has sent was acknowledged
            found.update(_counters(link))
    except (OSError, ValueError, struct.error) as error:
        found["error"] = reason(error)
    return found


def _meet(number: int, peer: int, listener: socket.socket, address: str, port: int) -> socket.socket:
    if number < peer:
        link = socket.create_connection((address, port), timeout=CONNECT)
        link.sendall(struct.pack("!I", number))
        return link
    end = time.monotonic() + CONNECT + 0.5
    links: list[socket.socket] = []
    while time.monotonic() < end:
        for source in readable([listener, *links], end - time.monotonic()):
            with contextlib.suppress(OSError):
                if source is listener:
                    links.append(listener.accept()[0])
                elif source.recv(4, socket.MSG_DONTWAIT) == struct.pack("!I", peer):
                    return source  # type: ignore[no-any-return]
            if source is not listener:
                links.remove(source)
                source.close()  # a late one of an earlier round, or a stranger
        if len(links) > STRANGERS:
            links.pop(0).close()
    raise OSError(0, f"no connection from node {peer} arrived")


def _pings(link: socket.socket, sends: bool, end: float) -> Message:
    """Exchange a few small messages; returns the fastest, of a node that sends."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    buffer, times = memoryview(bytearray(64)), []
    for _ in range(PINGS):
        began = time.monotonic()
        if sends:
            link.sendall(buffer)
        _receive(link, buffer, end)
        if not sends:
            link.sendall(buffer)
        times.append(time.monotonic() - began)
    return {"latency": min(times) / 2} if sends else {}


def _stream(link: socket.socket, end: float) -> None:
    """Send blocks, the first byte of the last of which is 1."""
    block = bytearray(CHUNK)
    began = time.monotonic()
    for number in range(MOST):
        spent = time.monotonic() - began
        block[0] = number == MOST - 1 or spent > SLOW or (number >= LEAST and spent > FAST)
        link.settimeout(max(0.1, end - time.monotonic()))
        try:
            link.sendall(block)
        except OSError as error:
            raise OSError(0, f"{reason(error)} after {number * CHUNK >> 10} KiB were sent") from None
        if block[0]:
            return


def _drain(link: socket.socket, end: float) -> float:
    """Receive blocks; returns bytes per second of the fastest WINDOW: a busy CPU delays some of them."""
    block = memoryview(bytearray(CHUNK))
    times: list[float] = []
    while not times or not block[0]:
        try:
            _receive(link, block, end)
        except OSError as error:
            what = f"after {len(times) * CHUNK >> 10} KiB had arrived, small messages did: check the MTU and firewalls"
            raise OSError(0, f"{reason(error)} {what}") from None
        times.append(time.monotonic())
    size = max(1, min(WINDOW, len(times) - 1))
    return size * CHUNK / max(min((late - early for early, late in zip(times, times[size:])), default=ROUND), 1e-9)


def _receive(link: socket.socket, buffer: memoryview, end: float) -> None:
    got = 0
    while got < len(buffer):
        left = end - time.monotonic()
        if left <= 0:
            raise OSError(0, "timed out")
        link.settimeout(left)
        piece = link.recv_into(buffer[got:])
        if not piece:
            raise OSError(0, "the connection was closed")
        got += piece


def _counters(link: socket.socket) -> Message:
    """Return how many segments this node has sent, and how many of them again; {} where the kernel does not say."""
    with contextlib.suppress(OSError, struct.error):
        info = link.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 192)
        again, segments = (struct.unpack_from("=I", info, offset)[0] for offset in (RETRANSMITTED, SEGMENTS))
        return {"retransmitted": again, "segments": segments}
    return {}
