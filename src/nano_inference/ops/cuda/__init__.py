"""The CUDA backend: kernels in Triton for what is not a product of matrices, cuBLAS for what is.

Every kernel runs in Triton's interpreter too (`TRITON_INTERPRET=1`), on CPU tensors: that is how
they are tested where there is no GPU. All are launched without contraction of products and sums
(`enable_fp_fusion=False`), so that the same expression gives the same bits in two kernels; where a
fused operation is wanted it is written, `tl.fma`.
"""
