"""What a captured step reads: a batch in front of blank frames, whatever was there before. Graphs themselves need a GPU."""

import torch

from forgefield.training.engines.blank import blank_frames, sizes
from forgefield.training.engines.graphs import _Captured, _load
from tests.training.engines.cases import labelled


def test_a_batch_is_put_in_front_of_blank_frames():
    first, second = labelled(5, 3), labelled(2)
    n_frames, n_atoms, n_edges = sizes(first)
    blank = blank_frames(first, frames=n_frames, atoms=n_atoms + 2, edges=n_edges + 6, reach=4.0)
    read = {key: tensor.clone() for key, tensor in blank.items()}
    captured = _Captured(None, list(blank.values()), read, None, None)
    for batch in (first, second):
        _load(captured, batch, None)
        for key, found in read.items():
            expected = blank[key].clone()
            place = (slice(None),) * (key == "edge_index") + (
                slice(batch[key].shape[-1 if key == "edge_index" else 0]),
            )
            expected[place] = batch[key]
            assert torch.equal(found.nan_to_num(), expected.nan_to_num()), key
