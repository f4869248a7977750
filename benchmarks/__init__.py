"""Measurements that take minutes: run by hand, never pass or fail on wall time."""
