"""`python -m swarm.evil ATTACK join INVITE ...`: what `swarm-node demo --evil 1` starts."""

import sys
from functools import partial

from swarm.cli import join
from swarm.cli.arguments import Parser
from swarm.evil.attacks import Attack
from swarm.evil.node import EvilVolunteer


def main() -> int:
    """Join a swarm on one's own machine, and do it harm."""
    parser = Parser(prog="python -m swarm.evil")
    parser.add_argument("attack", choices=list(Attack), type=Attack)
    join.add(parser.add_subparsers(metavar="VERB", required=True, parser_class=Parser))
    arguments = parser.parse_args()
    return join.join(arguments, partial(EvilVolunteer, arguments.attack))


if __name__ == "__main__":
    sys.exit(main())
