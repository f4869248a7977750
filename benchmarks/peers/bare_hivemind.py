"""A bare hivemind node, as its documentation starts one; a `benchmarks.measure.Worker`."""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from self_measuring import serve

_made: list[Any] = []


def start() -> dict[str, Any]:
    """Start it; it ends with this process."""
    import hivemind

    _made.append(hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"]))
    return {"pid": os.getpid()}


if __name__ == "__main__":
    serve({"start": start})
    for dht in _made:
        dht.shutdown()
