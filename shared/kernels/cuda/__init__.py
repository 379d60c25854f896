"""GPU members of every operation: Triton kernels, and library kernels certified to be in the same bit class."""
