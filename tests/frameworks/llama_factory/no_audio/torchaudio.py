"""Nothing: the package's builds want CUDA. LLaMA-Factory imports it at once, and needs it for sound."""
