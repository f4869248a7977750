"""hivemind's DHT and libp2p parts without the torch, scipy and grpc that `import hivemind` loads.

Owns: which names of hivemind this project uses. Bare package modules stand in front of hivemind's
own `__init__` files, so that only the modules named here are executed: 0.2 s and 40 MB instead of
some 2 s and 290 MB. It depends on hivemind's file layout, so it accepts exactly one version.
Does not know: what is done with them; the mended functions are in `hivemind_fixes`.
"""

# ruff: noqa: E402  the bare packages must be in place before anything of hivemind is imported

import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path

from swarm.errors import ConfigError

HIVEMIND_VERSION = "1.1.12"

# What `hivemind.utils` offers to the modules loaded below, in place of its own __init__.
_UTILS_NAMES = {
    "hivemind.utils.logging": ("get_logger",),
    "hivemind.utils.serializer": ("MSGPackSerializer", "SerializerBase"),
    "hivemind.utils.timed_storage": (
        "DHTExpiration",
        "TimedStorage",
        "ValueWithExpiration",
        "get_dht_time",
    ),
}


def _install_bare_packages() -> None:
    """Put empty `hivemind`, `hivemind.dht` and `hivemind.utils` packages into sys.modules."""
    if "hivemind" in sys.modules:  # whole, imported by the host program: nothing left to save
        return
    found = importlib.metadata.version("hivemind")
    if found != HIVEMIND_VERSION:
        raise ConfigError(
            f"hivemind {found} is installed; exactly {HIVEMIND_VERSION} is needed: "
            f"pip install hivemind=={HIVEMIND_VERSION}"
        )
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("hivemind is installed, but its package folder cannot be found")
    root = Path(spec.submodule_search_locations[0])
    for name, folder in (
        ("hivemind", root),
        ("hivemind.dht", root / "dht"),
        ("hivemind.utils", root / "utils"),
    ):
        module = types.ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    utils = sys.modules["hivemind.utils"]
    for name, attributes in _UTILS_NAMES.items():
        source = importlib.import_module(name)
        for attribute in attributes:
            setattr(utils, attribute, getattr(source, attribute))


_install_bare_packages()

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # has no stubs
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.p2p.p2p_daemon_bindings.utils import (
    P2PDaemonError,
    P2PHandlerError,
    read_pbmsg_safe,
    write_pbmsg,
)
from hivemind.proto import dht_pb2, p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import HeapEntry, TimedStorage, ValueWithExpiration

__all__ = [
    "DHTID",
    "HIVEMIND_VERSION",
    "P2P",
    "P2PD_PATH",
    "ControlClient",
    "DHTNode",
    "DHTProtocol",
    "DecodeError",
    "DictionaryDHTValue",
    "HeapEntry",
    "MSGPackSerializer",
    "Multiaddr",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "TimedStorage",
    "ValueWithExpiration",
    "dht_pb2",
    "p2pd_pb2",
    "read_pbmsg_safe",
    "write_pbmsg",
]

P2PD_PATH = Path(sys.modules["hivemind"].__path__[0]) / "hivemind_cli" / "p2pd"
"""The libp2p daemon that hivemind's wheel brings."""

# hivemind installs a handler of its own on import; logging is the command line's to configure.
use_hivemind_log_handler("nowhere")
