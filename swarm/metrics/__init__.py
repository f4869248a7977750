"""Figures for other programs: Prometheus and probes over HTTP, curves for TensorBoard."""
