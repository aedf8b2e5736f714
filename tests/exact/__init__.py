import gpu_worker  # noqa: F401 - before torch: sets how OpenMP waits
