"""The decode step by Triton kernels, on a CUDA device.

The way in is `seam.substitute_for`. `switch` says whether these kernels serve, modules named triton_* have them.
"""
