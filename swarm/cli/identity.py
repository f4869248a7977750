"""Who this node is: `swarm-node identity show`, `export`, `import`."""

from pathlib import Path

from swarm.cli.arguments import Arguments, Verbs, add_data_dir, add_verb, data_dir_of
from swarm.cli.output import out, out_json
from swarm.errors import ExitCode, IdentityError


def add(verbs: Verbs) -> None:
    """Declare the verbs."""
    identity = add_verb(
        verbs,
        "identity",
        _show,
        "show, back up or restore the key that makes this node itself to others",
        "  swarm-node identity show\n"
        "  swarm-node identity export ~/backup/swarm.key\n"
        "  swarm-node identity import ~/backup/swarm.key\n",
    )
    identity.set_defaults(json=False)
    kinds = identity.add_subparsers(metavar="show|export|import", parser_class=type(identity))
    show = add_verb(
        kinds,
        "show",
        _show,
        "print the peer id and where the key lies",
        "  swarm-node identity show\n",
    )
    show.add_argument("--json", action="store_true", help="as JSON")
    export = add_verb(
        kinds,
        "export",
        _export,
        "copy the secret key to a new file; who has it can act as this node",
        "  swarm-node identity export ~/backup/swarm.key\n",
    )
    export.add_argument("file", type=Path, metavar="FILE")
    importing = add_verb(
        kinds,
        "import",
        _import,
        "take over an exported key; refused where there is another key",
        "  swarm-node identity import ~/backup/swarm.key\n",
    )
    importing.add_argument("file", type=Path, metavar="FILE")
    add_data_dir(identity, show, export, importing)


def _show(arguments: Arguments) -> int:
    from swarm.protocol.identity import Identity

    path = data_dir_of(arguments).identity_path
    if not path.exists():
        raise _missing(path)
    peer_id = Identity.load_or_create(path).peer_id
    if arguments.json:
        out_json({"schema": "swarm-node/identity/1", "peer_id": peer_id, "path": str(path)})
    else:
        out(f"{peer_id}\n{path}")
    return ExitCode.OK


def _export(arguments: Arguments) -> int:
    from swarm.paths import user_path
    from swarm.protocol.identity import Identity

    path, file = data_dir_of(arguments).identity_path, user_path(arguments.file)
    if not path.exists():
        raise _missing(path)
    identity = Identity.load_or_create(path)
    if file.exists():
        raise IdentityError(f"{file} exists already; name another file")
    if Identity.store(file, identity).peer_id != identity.peer_id:
        raise IdentityError(f"{file} was made by another process just now; name another file")
    out(f"{identity.peer_id} written to {file}; keep it secret")
    return ExitCode.OK


def _import(arguments: Arguments) -> int:
    from swarm.paths import user_path
    from swarm.protocol.identity import Identity

    data_dir, file = data_dir_of(arguments), user_path(arguments.file)
    if not file.exists():
        raise _missing(file)
    identity = Identity.load_or_create(file)
    with data_dir.locked():
        kept = Identity.store(data_dir.identity_path, identity)
    if kept.peer_id != identity.peer_id:
        raise IdentityError(
            f"{data_dir.identity_path} is {kept.peer_id} already; export it, then move it away"
        )
    out(f"this node is {identity.peer_id}")
    return ExitCode.OK


def _missing(path: Path) -> IdentityError:
    return IdentityError(
        f"{path} does not exist; `swarm-node init`, `join` and `seed` make an identity"
    )
