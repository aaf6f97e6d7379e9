"""What a step may raise that fails it and nothing else."""

STEP_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)
"""What torch and numpy raise for a step that cannot be run: shapes, indices, memory."""
