"""whorl's own CUDA kernels: compiled at first use, kept on disk, launched through the driver."""
