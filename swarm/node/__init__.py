"""The node process: a member of a swarm, as a volunteer that trains or as the organizer.

Owns: the loop of a node and all that it keeps: membership, announcements, gathering, blobs.
Does not know: tensors (they live in the learner process), how bytes reach a peer (`swarm.net`).
"""
