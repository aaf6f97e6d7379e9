"""Times the GPU kernels against measured ceilings."""
