"""Parts of attention over a larger whole: partial results, their merge, and the kernels that compute them."""
