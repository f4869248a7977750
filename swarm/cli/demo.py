"""A whole swarm on this machine: `swarm-node demo`."""

from pathlib import Path

from swarm.cli.arguments import METHOD_HELP, Arguments, Verbs, add_verb
from swarm.evil.attacks import Attack


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    demo = add_verb(
        verbs,
        "demo",
        _demo,
        "run a whole swarm on this machine and watch it learn",
        "  swarm-node demo\n  swarm-node demo --method nois\n"
        "  swarm-node demo --nodes 2 --steps 100 --json\n"
        "  swarm-node demo --evil 1 --attack garbage\n",
    )
    demo.add_argument("--nodes", type=int, default=3, metavar="N", help="volunteers (default 3)")
    demo.add_argument("--steps", type=int, metavar="N", help="steps of the slowest node")
    demo.add_argument(
        "--evil", type=int, default=0, metavar="N", help="further nodes that attack (default 0)"
    )
    demo.add_argument(
        "--attack",
        choices=[str(attack) for attack in Attack],
        default=str(Attack.POISON),
        metavar="KIND",
        help=f"what these do (default %(default)s): {', '.join(Attack)}",
    )
    demo.add_argument("--seed", type=int, default=0, metavar="N")
    demo.add_argument("--method", default="ftis", metavar="NAME", help=METHOD_HELP)
    demo.add_argument(
        "--model",
        action="append",
        type=Path,
        default=[],
        metavar="DIR",
        help="your own models instead (repeatable), or DIR:lora; one tokenizer",
    )
    demo.add_argument("--out", type=Path, metavar="DIR", help="where results and logs go")
    demo.add_argument("--json", action="store_true", help="the results as JSON on stdout")


def _demo(arguments: Arguments) -> int:
    from swarm.demo.run import run_demo
    from swarm.demo.task import DemoOptions

    options = DemoOptions(
        nodes=arguments.nodes,
        evil=arguments.evil,
        attack=Attack(arguments.attack),
        steps=arguments.steps,
        seed=arguments.seed,
        method=arguments.method,
        models=tuple(arguments.model),
        out=arguments.out,
        json=arguments.json,
    )
    return run_demo(options)
