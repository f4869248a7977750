"""A node as a service: what systemd is told, and the unit that tells systemd about the node.

Owns: sd_notify's datagrams and the unit's text. Does not know: the node's life, systemctl.
"""

import os
import socket
import sys
from pathlib import Path

UNIT_NAME = "swarm-node.service"


def notify(state: str) -> bool:
    """Tell the service manager something, e.g. "READY=1".

    Returns:
        Whether there is one and it could be told.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(state.encode(), address)
    except OSError:
        return False
    return True


def unit_text(data_dir: Path, *, verb: str = "join") -> str:
    """A systemd user unit that runs `swarm-node VERB` on a data directory.

    No MemoryDenyWriteExecute and no PrivateDevices: CUDA and torch's compilers need what they
    forbid. No mount namespace (ProtectSystem and the like): in a user unit it implies PrivateUsers,
    under which a GPU's device files can belong to nobody.
    """
    return f"""\
[Unit]
Description=swarm-node: train a model together with others
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart={_quoted(sys.executable)} -P -m swarm.cli {verb} --data-dir {_quoted(str(data_dir))}
Restart=on-failure
RestartSec=15
# Wrong settings, a missing identity or a wrong command do not mend themselves.
RestartPreventExitStatus=2 77 78
TimeoutStartSec=120
TimeoutStopSec=120
KillMode=mixed

NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
UMask=0077
LimitNOFILE=65536
TasksMax=4096

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    """A word of a unit's command line: `%` and `$` are systemd's, blanks and quotes need quotes."""
    escaped = word.replace("%", "%%").replace("$", "$$")
    if not any(char in escaped for char in " \t\"'\\"):
        return escaped
    return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"') + '"'
