"""Verifies the GPU kernels and times them against measured ceilings."""
