"""Join a swarm and train: `swarm-node join`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.cli.arguments import (
    METHOD_HELP,
    Arguments,
    Verbs,
    add_node_flags,
    add_verb,
    joining,
)
from swarm.cli.output import configure_logging, run_async
from swarm.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from swarm.node.volunteer import Volunteer


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    join = add_verb(
        verbs,
        "join",
        _join,
        "join a swarm and train; without INVITE, go on with the last one",
        "  swarm-node join swarm1... --model ~/models/Qwen2.5-1.5B --mode lora\n"
        "  swarm-node join --config node.toml\n"
        "  swarm-node join --set train.learning_rate=2e-6\n",
    )
    join.add_argument("invite", nargs="?", metavar="INVITE", help="what `seed` or `invite` printed")
    join.add_argument("--config", type=Path, metavar="FILE", help="node.toml")
    join.add_argument("--model", metavar="DIR|ID", help="model folder or Hub id")
    join.add_argument("--mode", choices=("full", "lora"), help="train all weights or an adapter")
    join.add_argument("--lora-rank", metavar="N", help="rank of the adapter")
    join.add_argument("--learning-rate", metavar="X", help="peak learning rate")
    join.add_argument("--max-steps", metavar="N", help="stop training after N steps")
    join.add_argument("--method", metavar="NAME", help=METHOD_HELP)
    join.add_argument("--seed", metavar="N", help="seed of sampling")
    join.add_argument("--new-run", action="store_true", help="start from the model's own weights")
    join.add_argument(
        "--fail-fast", action="store_true", help="exit with 69 when no member can be reached"
    )
    add_node_flags(join)


def _join(arguments: Arguments) -> int:
    def volunteer(*args: Any, **kwargs: Any) -> "Volunteer":
        from swarm.node.volunteer import Volunteer

        return Volunteer(*args, **kwargs)

    return join(arguments, volunteer)


def join(arguments: Arguments, volunteer: "Callable[..., Volunteer]") -> int:
    """Take part until stopped.

    Args:
        arguments: the verb's.
        volunteer: makes the node; takes what `Volunteer` takes.
    """
    chosen = joining(arguments)
    config, data_dir = chosen.config, chosen.data_dir
    if chosen.swarm_id is None:
        raise UsageError(
            f"no swarm has been joined in {data_dir.root} yet; give an invite: join swarm1..."
        )

    async def run() -> None:
        node = volunteer(
            config,
            data_dir,
            swarm_id=chosen.swarm_id,
            addresses=chosen.addresses,
            fail_fast=arguments.fail_fast,
            new_run=arguments.new_run,
        )
        await node.run()

    with data_dir.locked():
        configure_logging(config.node.log_level, data_dir.log_path)
        run_async(run())
    return ExitCode.OK
