"""What a step may raise that fails it and nothing else."""


def _of_triton() -> tuple[type[Exception], ...]:
    """What Triton raises for a kernel that does not compile or fit a device: an exception of its own kind."""
    try:
        from triton.errors import TritonError
    except ImportError:  # a torch for CPUs comes without
        return ()
    return (TritonError,)


STEP_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    IndexError,
    TypeError,
    OverflowError,
    *_of_triton(),
)
"""What torch, numpy and Triton raise for a step that cannot be run: shapes, indices, numbers, memory."""
