"""The evaluation engine on a GPU: energies, forces and stress of systems whose atoms move, as captured CUDA graphs.

`device.py` decides (lists, sizes, retries), `program.py` computes one evaluation in tensors of fixed size, `comparison.py`
compares with the eager model in float64.
"""
