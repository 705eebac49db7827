"""`gemm`: grouped products of one device, beside dense ones."""
