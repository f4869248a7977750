"""Reinforcement learning: loss, trainer, policy, sampling engine, checkpoints.

Imports torch; knows nothing of the network. Runs in the learner process only.
"""
