"""A malicious volunteer, to measure what a swarm can take: the demo's and the benchmark's only.

No verb of `swarm-node` leads here; `swarm-node demo --evil 1` starts `python -m swarm.evil`.
"""
