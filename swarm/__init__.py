"""Swarm-node: volunteers train their own language models together (see README.md)."""

__version__ = "0.1.0"
