"""Benchmarks of an engine or a kernel without a server; they run from a bare clone."""
