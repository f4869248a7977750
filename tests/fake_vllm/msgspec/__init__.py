"""The part of msgspec that the child of the vLLM engine uses."""
