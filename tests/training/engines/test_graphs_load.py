"""What a captured step reads: a batch in front of blank frames, whatever was there before. Graphs themselves need a GPU.

With TRITON_INTERPRET=1 the copies are made by the kernel, else by torch.
"""

import torch

from forgefield.data.padding import blank_frames, sizes
from forgefield.training.engines.graphs import StaticInputs
from tests.support.engine_cases import labelled


def assert_loaded(loader, batch, blank):
    for key, found in loader.batch.items():
        expected = blank[key].clone()
        place = (slice(None),) * (key == "edge_index") + (slice(batch[key].shape[-1 if key == "edge_index" else 0]),)
        expected[place] = batch[key]
        assert torch.equal(found.nan_to_num(), expected.nan_to_num()), key


def loader_for(like, denominators=None):
    n_frames, n_atoms, n_edges = sizes(like)
    blank = blank_frames(like, frames=n_frames, atoms=n_atoms + 2, edges=n_edges + 6, cutoff=4.0)
    return StaticInputs(blank, denominators), blank


def test_a_batch_is_put_in_front_of_blank_frames():
    first, second = labelled(5, 3), labelled(2)
    loader, blank = loader_for(first)
    for batch in (first, second):
        loader.load(batch, None)
        loader.launch()
        assert_loaded(loader, batch, blank)


def test_batches_that_lie_otherwise_are_put_there_just_so():
    batch = labelled(5, 3)
    loader, blank = loader_for(batch)
    turned = {key: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for key, tensor in batch.items()}
    assert not turned["forces"].is_contiguous()
    turned["energy"] = turned["energy"].float()
    loader.load(turned, None)
    loader.launch()
    assert_loaded(loader, {**batch, "energy": turned["energy"]}, blank)


def test_denominators_are_those_of_the_step():
    batch = labelled(2)
    loader, _ = loader_for(batch, torch.tensor([1.0, 2.0], dtype=torch.float64))
    given = torch.tensor([3.0, 5.0], dtype=torch.float64)
    for known in (given, None):  # nothing said: as before
        loader.load(batch, known)
        loader.launch()
        assert torch.equal(loader.denominators, given)
