"""What a run logged, and what can be learned from it again: replay and what-if."""
