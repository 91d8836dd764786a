"""Block-sparse attention: lists of kept blocks, the CPU way and the Triton kernels over them, and selection by content."""
