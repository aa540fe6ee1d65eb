"""The kernel library: a whole step of a model in C++, for CPUs. See docs/kernels.md."""
