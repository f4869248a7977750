"""The protocol: bytes, hashes, signatures and rules that all members must agree on.

Owns: what a swarm is, who signs what, who samples which prompt, how a group of completions is
written. Does not know: the network, the disk (but for the identity's key file), the clock, torch.
"""
