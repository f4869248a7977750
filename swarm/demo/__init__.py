"""A whole swarm on this machine: `swarm-node demo`, and the rehearsals that are made of it."""
