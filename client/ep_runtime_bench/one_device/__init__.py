"""`gemm`, `quantize` and `permute`: work of one device, beside dense products and copies."""
