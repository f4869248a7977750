"""The node's side of its learner: the process, the calls to it and their framing, without torch.

The other side is `swarm.rl.learner`.
"""
