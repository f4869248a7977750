"""A network of its own for each node, joined by a switch in this process that can fail.

Each name gets a network namespace with a TUN device; the switch reads and writes the IP packets of
all of them. So what is lost, late or cut off is so for real TCP. Needs root and Linux.
"""

import fcntl
import heapq
import itertools
import os
import random
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Collection, Sequence

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_NET = "10.77.0"
_MAX_PACKET_BYTES = 65_536


def allowed() -> bool:
    """Whether this user may make network namespaces."""
    if os.geteuid() != 0 or not os.access("/dev/net/tun", os.W_OK):
        return False
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return tried.returncode == 0


class Wires:
    """Namespaces and the switch between them, until the block ends.

    Args:
        names: of the nodes.

    Attributes:
        loss: share of packets that the switch drops.
        delay_s: how late the others arrive, in each direction.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.loss = 0.0
        self.delay_s = 0.0
        self.carried = self.dropped = 0
        self._spaces = {name: f"swarm-{os.getpid()}-{i}" for i, name in enumerate(names)}
        self._hosts = {name: f"{_NET}.{i}" for i, name in enumerate(names, 1)}
        self._devices: dict[bytes, int] = {}
        self._side: dict[bytes, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> "Wires":
        try:
            for name in self._spaces:
                self._plug_in(name)
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._remove()

    def host(self, name: str) -> str:
        """The address that a node has."""
        return self._hosts[name]

    def prefix(self, name: str) -> list[str]:
        """What starts a command in the node's namespace, with the same pid."""
        return ["nsenter", f"--net=/run/netns/{self._spaces[name]}"]

    def split(self, *sides: Collection[str]) -> None:
        """From now on packets go between nodes of one side only."""
        self._side = {
            _packed(self._hosts[name]): number for number, side in enumerate(sides) for name in side
        }

    def heal(self) -> None:
        """Packets go everywhere again."""
        self._side = {}

    def _plug_in(self, name: str) -> None:
        space, host = self._spaces[name], self._hosts[name]
        _ip("netns", "add", space)
        device = f"{space[-14:]}t"
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._devices[_packed(host)] = fd
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
        _ip("link", "set", device, "netns", space)
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "addr", "add", f"{host}/24", "dev", device)
        _ip("-n", space, "link", "set", device, "up")

    def _remove(self) -> None:
        for fd in self._devices.values():
            os.close(fd)
        for space in self._spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def _carry(self) -> None:
        late: list[tuple[float, int, bytes]] = []
        order = itertools.count()
        chance = random.Random(0)
        with selectors.DefaultSelector() as ready:
            for fd in self._devices.values():
                ready.register(fd, selectors.EVENT_READ)
            while not self._over.is_set():
                wait_s = max(0.0, late[0][0] - time.monotonic()) if late else 0.2
                for key, _ in ready.select(min(wait_s, 0.2)):
                    packet = os.read(key.fd, _MAX_PACKET_BYTES)
                    if self._passes(packet) and chance.random() >= self.loss:
                        heapq.heappush(late, (time.monotonic() + self.delay_s, next(order), packet))
                    else:
                        self.dropped += 1
                while late and late[0][0] <= time.monotonic():
                    self._deliver(heapq.heappop(late)[2])

    def _passes(self, packet: bytes) -> bool:
        source, target = packet[12:16], packet[16:20]
        if packet[0] >> 4 != 4 or target not in self._devices:
            return False
        return self._side.get(source) == self._side.get(target)

    def _deliver(self, packet: bytes) -> None:
        try:
            os.write(self._devices[packet[16:20]], packet)
            self.carried += 1
        except OSError:  # its queue is full: lost, as on any wire
            self.dropped += 1


def _packed(host: str) -> bytes:
    return bytes(int(part) for part in host.split("."))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
