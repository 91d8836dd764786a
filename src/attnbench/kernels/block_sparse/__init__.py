"""Block-sparse attention: tables of kept blocks, the CPU way and Triton kernels over them, and selection by content."""
