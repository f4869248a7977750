"""`python -m swarm.cli`."""

from swarm.cli.main import main

if __name__ == "__main__":
    main()
