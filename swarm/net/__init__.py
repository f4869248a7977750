"""The network: hivemind's DHT for small signed records, libp2p streams for payloads.

Owns: connections, records on their way, frames of a stream. Does not know: what a record, a charter
or a blob means, and nothing of torch (swarm.protocol and the node do).
"""
