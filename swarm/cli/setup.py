"""Before and beside a swarm: `swarm-node init`, `swarm-node version`."""

import json
from pathlib import Path

from swarm import __version__
from swarm.cli.arguments import Arguments, Verbs, add_data_dir, add_verb, data_dir_of
from swarm.cli.output import out, out_json
from swarm.errors import ConfigError, ExitCode


def add_init(verbs: Verbs) -> None:
    """Declare `init`."""
    init = add_verb(
        verbs,
        "init",
        _init,
        "write a commented node.toml and make the identity",
        "  swarm-node init\n  swarm-node init --config ~/swarm/node.toml\n",
    )
    init.add_argument("--config", type=Path, metavar="FILE", help="where; default: in the data dir")
    add_data_dir(init)


def add_version(verbs: Verbs) -> None:
    """Declare `version`."""
    version = add_verb(
        verbs,
        "version",
        _version,
        "print versions",
        "  swarm-node version\n  swarm-node version --json\n",
    )
    version.add_argument("--json", action="store_true", help="as JSON")


def _init(arguments: Arguments) -> int:
    from swarm.config import render_example
    from swarm.paths import user_path, write_atomic
    from swarm.protocol.identity import Identity

    data_dir = data_dir_of(arguments)
    path = user_path(arguments.config) if arguments.config else data_dir.root / "node.toml"
    if path.exists():
        raise ConfigError(f"{path} exists already; edit it, or name another with --config")
    data_dir.create()
    identity = Identity.load_or_create(data_dir.identity_path)
    text = render_example()
    if arguments.data_dir is not None:
        empty = 'data_dir = ""'
        text = text.replace(empty, f"data_dir = {_quoted(str(data_dir.root.absolute()))}", 1)
    write_atomic(path, text.encode())
    out(
        f"config    {path}\nidentity  {identity.peer_id}\n"
        f"next      edit it, then: swarm-node join INVITE --config {path}"
    )
    return ExitCode.OK


def _quoted(text: str) -> str:
    """As a string of TOML, which knows no surrogate pairs."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _version(arguments: Arguments) -> int:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    versions = {"swarm-node": __version__, "python": platform.python_version()}
    for name in ("hivemind", "torch", "transformers", "peft", "vllm"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    if arguments.json:
        out_json({"schema": "swarm-node/version/1", "versions": versions})
    else:
        out("\n".join(f"{name} {number}" for name, number in versions.items()))
    return ExitCode.OK
