"""Files from strangers: what they declare is checked against the bytes that are there before memory is taken or code is run.

`archives` limits what compressed files may unpack to and reads npz files, `documents` reads JSON and YAML, `safe_pickle` and
`torch_files` read pickles and files of PyTorch.
"""
