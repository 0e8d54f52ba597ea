"""A Triton backend that has no compiler: its kernels run in Triton's interpreter, on CPU tensors."""
