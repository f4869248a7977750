"""`swarm-node`: the command line. `main` holds the entry point, a module each holds a few verbs."""
