"""The CUDA backend: Triton kernels, and cuBLAS for products that need not be batch-invariant.

Every kernel also runs in Triton's interpreter (`TRITON_INTERPRET=1`) on CPU tensors, which tests
use on machines without a GPU. All kernels are launched without contraction of products and sums
(`enable_fp_fusion=False`), so that the same expression has the same bits in all kernels. Fused
operations are written explicitly as `tl.fma`.
"""
