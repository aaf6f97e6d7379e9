"""Seeded workloads: scripts of agent programs, and the order in which their turns are sent. No I/O."""
