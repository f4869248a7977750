"""`swarm-node doctor`: what works here, and between here and a swarm, and what does not."""
