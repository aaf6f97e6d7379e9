"""What measures an engine or a kernel without a server; runs from a bare clone."""
