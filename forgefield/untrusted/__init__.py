"""Files from strangers: what they declare is checked against the bytes that are there before memory is taken or code is run.

`expansion` limits what compressed files may unpack to, `npy` reads headers of arrays, `archives` reads zip and npz files.
"""
