"""Own compute kernels. cpu/: fused forward passes of llama-shaped decoders in C++, called through ctypes."""
