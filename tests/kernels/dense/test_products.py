"""Products of all blocks in one launch, gradients of all matrices, atoms by species and matrices from weights, each against
plain operations of torch."""

import dataclasses

import pytest
import torch

from forgefield.kernels.core.fields import TANGENT, VALUE, Field, Shape
from forgefield.kernels.dense import products
from forgefield.kernels.dense.matrices import Matrices, Matrix
from forgefield.kernels.dense.products import Gradient, Gradients, Product, Products, sort_by_species
from forgefield.models.nequip import passes as nequip_passes
from tests.support.kernels import DEVICE, assert_same, draw, needs_kernels
from tests.support.nequip_kernel_cases import CASES, batch, step
from tests.support.structures import make_potential

pytestmark = needs_kernels
DTYPES = {torch.float64: 1e-13, torch.float32: 1e-6}
WIDTHS = {
    "narrow": ((1, 3, 5), (5, 3, 2), (7, 9, 40), (6, 3, 33)),
    "wide pieces": ((1, 3), (16, 32), (48, 16), (80, 16)),
}
"""Components of the blocks; channels of features, of what is convolved, and of the result."""


def some_species(n_species: int, n_atoms: int):
    """One species of many is absent."""
    species = torch.randint(0, n_species, (n_atoms,), generator=torch.Generator().manual_seed(3))
    return torch.where(species == 1, 0, species).to(DEVICE) if n_species > 2 else species.to(DEVICE)


class Scene:
    """Fields h, z, a and b (as h) in an arena of which b is not filled, and matrices for h and z."""

    def __init__(self, widths: str, n_species: int, dtype: torch.dtype, n_atoms: int = 37) -> None:
        self.components, features, convolved, results = WIDTHS[widths]
        channels = {"h": features, "z": convolved, "a": results, "b": features}
        self.n_atoms, self.n_species, self.channels = n_atoms, n_species, channels
        self.shapes = {name: Shape(tuple(zip(self.components, widths))) for name, widths in channels.items()}
        self.starts, dim = {}, 0
        for name, shape in self.shapes.items():
            self.starts[name], dim = dim, dim + -(-shape.dim // 16) * 16
        self.arena = draw(1, 2 * n_atoms * dim, dtype=dtype)
        self.arena[2 * n_atoms * self.starts["b"] :] = torch.nan
        self.species = some_species(n_species, n_atoms)
        self.one_hot = torch.nn.functional.one_hot(self.species, n_species).to(dtype)
        self.kinds = sort_by_species(self.species, n_species) if n_species > 1 else None
        self.places: dict[tuple[str, int], int] = {}
        size = 0
        for block in range(len(self.components)):
            for name, rows in (("leave", convolved[block]), ("own", features[block] * n_species)):
                self.places[name, block] = size
                size += rows * results[block]
        self.matrices = draw(2, size, dtype=dtype)
        self.packed = self.pack()

    def at(self, name: str, block: int) -> int:
        return self.starts[name] + self.shapes[name].starts[block]

    def field(self, name: str) -> Field:
        begin, shape = 2 * self.n_atoms * self.starts[name], self.shapes[name]
        return Field(self.arena[begin : begin + 2 * self.n_atoms * shape.dim], self.n_atoms, shape)

    def matrix(self, name: str, block: int) -> torch.Tensor:
        """(z, a), or (h, n_species, a) of the species."""
        a = self.channels["a"][block]
        rows = (self.channels["z"][block],) if name == "leave" else (self.channels["h"][block], self.n_species)
        begin = self.places[name, block]
        length = a * torch.Size(rows).numel()
        return self.matrices[begin : begin + length].view(*rows, a)

    def pack(self) -> torch.Tensor:
        """As `Matrices` does: transposed and as they are, each as leading bits and the rest."""
        turned = torch.empty_like(self.matrices)
        for (name, block), begin in self.places.items():
            matrix = self.matrix(name, block)
            other = matrix.t() if name == "leave" else matrix.permute(1, 2, 0)
            turned[begin : begin + matrix.numel()] = other.flatten()
        halves = []
        for row in (turned, self.matrices):
            high = row.bfloat16().to(row) if row.dtype == torch.float32 else row
            halves += [high, row - high]
        return torch.cat(halves)

    def forwards(self) -> Products:
        parts = []
        for block, k in enumerate(self.components):
            h, z, a = (self.channels[name][block] for name in "hza")
            leave, own = self.places["leave", block], self.places["own", block]
            at_h, at_z, at_a = (self.at(name, block) for name in "hza")
            parts.append(Product(k, a, at_a, at_z, z, leave, z, at_h, h, own, h, h * a))
        return Products(parts)

    def backwards(self) -> Products:
        """To b from a through the matrices of species; from h, as it is, for the first block."""
        parts = []
        for block, k in enumerate(self.components):
            h, a = self.channels["h"][block], self.channels["a"][block]
            own, pitch, at_a = self.places["own", block], self.n_species * a, self.at("a", block)
            own += 2 * self.matrices.shape[0]
            add = self.at("h", block) if block == 0 else -1
            parts.append(Product(k, h, self.at("b", block), at_a, a, own, pitch, at_a, a, own, pitch, a, add))
        return Products(parts)

    def gradients(self) -> Gradients:
        parts = []
        for block, k in enumerate(self.components):
            h, z, a = (self.channels[name][block] for name in "hza")
            at_h, at_z, at_a = (self.at(name, block) for name in "hza")
            parts.append(Gradient(k, z, a, at_z, at_a, self.places["leave", block], a))
            n_kinds = self.n_species if self.n_species > 1 else 0
            parts.append(Gradient(k, h, a, at_h, at_a, self.places["own", block], self.n_species * a, n_kinds, a))
        return Gradients(parts)

    def of_each(self, block: int) -> torch.Tensor:
        """(n_atoms, h, a): the matrix of every atom's species."""
        return self.matrix("own", block).transpose(0, 1)[self.species]


@pytest.mark.parametrize("n_species", [1, 2, 5])
@pytest.mark.parametrize(("widths", "dtype"), [("narrow", torch.float64), ("wide pieces", torch.float32)])
def test_products_of_all_blocks(widths, dtype, n_species, monkeypatch):
    monkeypatch.setattr(products, "FAR", 2**31 if n_species == 2 else 0)
    scene = Scene(widths, n_species, dtype)
    before = scene.arena.clone()
    found = {}
    for plainly in (True, False):
        scene.arena.copy_(before)
        for made, place in ((scene.forwards(), VALUE), (scene.backwards(), TANGENT)):
            assert made.aligned == (widths == "wide pieces")
            if plainly:
                made.make_by_reference(scene.arena, scene.packed, scene.one_hot, scene.n_atoms, place)
            else:
                made.make(scene.arena, scene.packed, scene.kinds, scene.n_atoms, place)
        found[plainly] = scene.arena.clone()
    h, z, a, b = (scene.field(name) for name in "hzab")
    for block in range(len(scene.components)):
        forwards = z.block(block, VALUE) @ scene.matrix("leave", block)
        forwards = forwards + torch.einsum("nku,nuw->nkw", h.block(block, VALUE), scene.of_each(block))
        assert_same(a.block(block, VALUE), forwards, DTYPES[dtype])
        backwards = a.block(block, TANGENT) @ scene.matrix("own", block)[:, 0].t()
        backwards = backwards + torch.einsum("nkw,nuw->nku", a.block(block, TANGENT), scene.of_each(block))
        if block == 0:
            backwards = backwards + h.block(block, TANGENT)
        assert_same(b.block(block, TANGENT), backwards, DTYPES[dtype])
        assert b.block(block, VALUE).isnan().all()
    assert torch.equal(found[True].isnan(), found[False].isnan())
    assert_same(found[False].nan_to_num(), found[True].nan_to_num(), DTYPES[dtype])


@pytest.mark.parametrize("n_species", [1, 2, 5])
@pytest.mark.parametrize(
    ("widths", "chunk", "dtype"),
    [("narrow", 31, torch.float64), ("wide pieces", 40, torch.float32), ("narrow", 2048, torch.float32)],
)
def test_gradients_of_all_matrices(widths, chunk, dtype, n_species, monkeypatch):
    monkeypatch.setattr(products, "FAR", 2**31 if n_species == 2 else 0)
    if n_species == 5:  # as on GPUs whose tensor cores are slow in float64
        monkeypatch.setattr(products, "_precise", lambda device: "ieee")
    scene = Scene(widths, n_species, dtype)
    gradients = scene.gradients()
    ours, plain = (torch.full_like(scene.matrices, torch.nan) for _ in range(2))
    gradients.make(scene.arena, scene.kinds, scene.n_atoms, ours, chunk=chunk)
    gradients.make_by_reference(scene.arena, scene.one_hot, scene.n_atoms, plain)
    assert_same(ours, plain, 3 * DTYPES[dtype])
    h, z, a = (scene.field(name) for name in "hza")
    for block in range(len(scene.components)):
        scene.matrices = ours
        assert_same(scene.matrix("leave", block), z.both(block).t() @ a.both(block), 3 * DTYPES[dtype])
        own = [
            torch.einsum("nku,nkw,ns->usw", h.block(block, place), a.block(block, place), scene.one_hot)
            for place in (VALUE, TANGENT)
        ]
        assert_same(scene.matrix("own", block), own[0] + own[1], 3 * DTYPES[dtype])


def test_gradient_of_values_alone_never_reads_tangents():
    scene = Scene("narrow", 1, torch.float64)
    z, a = scene.field("z"), scene.field("a")
    z.block(1, TANGENT).fill_(torch.nan)
    part = dataclasses.replace(scene.gradients().parts[2], slots=1, out=0)
    out = torch.full((part.depth * part.width,), torch.nan, dtype=torch.float64, device=DEVICE)
    Gradients([part]).make(scene.arena, None, scene.n_atoms, out, chunk=29)
    assert_same(out.view(part.depth, part.width), z.rows(1, VALUE).t() @ a.rows(1, VALUE))


@pytest.mark.parametrize(("n_species", "n_atoms"), [(1, 3), (2, 2500), (3, 1), (30, 700)])
def test_atoms_by_species(n_species, n_atoms):
    species = some_species(n_species, n_atoms)
    kinds = sort_by_species(species, n_species)
    expected, order = torch.sort(species, stable=True)
    assert torch.equal(kinds.order.long(), order)
    assert torch.equal(kinds.species.long(), expected)
    edges = torch.arange(n_species + 1, device=DEVICE)
    assert torch.equal(kinds.pointers.long(), torch.searchsorted(expected, edges))


@pytest.mark.parametrize("where", ["parameters", "computed", "in a row"])
@pytest.mark.parametrize("n_species", [1, 3])
def test_matrices_from_weights(n_species, where, monkeypatch):
    monkeypatch.setattr("forgefield.kernels.dense.matrices.SUMMED", 32)  # seven parts, of which two are read at a time
    n_embedding = 5
    parts = [Matrix(True, 1, 5, 0, 0), Matrix(False, 4, 7, 25, 32), Matrix(True, 6, 131, 53, 64)]
    weights, constants = draw(1, 53 + 6 * n_embedding * 131), draw(3, 3)
    embedding = draw(2, n_species, n_embedding)

    def plain(weights, embedding):
        made = [constants[1] * weights[25:53]]
        for number in (0, 2):
            rows, width, begin = parts[number].rows, parts[number].width, parts[number].weight
            weight = weights[begin : begin + rows * n_embedding * width].view(rows, n_embedding, width)
            made.append(constants[number] * torch.einsum("uvw,sv->usw", weight, embedding).flatten())
        return made

    def pieces(row):
        lengths = (n_species * 5, 28, n_species * 6 * 131)
        first, second, third = (row[part.out : part.out + length] for part, length in zip(parts, lengths))
        return [second, first, third]

    matrices = Matrices(parts, 64 + n_species * 6 * 131, n_embedding)
    inputs = [weights.requires_grad_(True), embedding.requires_grad_(True)]
    rows, lengths = [weights], [25 + 28, 6 * n_embedding * 131]
    if where != "in a row":
        rows = list(weights.split(lengths))  # computed
    if where == "parameters":
        inputs = [*(row.detach().clone().requires_grad_(True) for row in rows), embedding]
        rows = inputs[:2]
    expected = plain(torch.cat(rows), embedding)
    row, packed = matrices(rows, embedding, constants)
    ours = pieces(row)
    given = [draw(5 + number, len(piece)) for number, piece in enumerate(expected)]
    halves = packed.view(4, -1)
    turned, same = (pieces(halves[number] + halves[number + 1]) for number in (0, 2))
    for number, (found, piece) in enumerate(zip(ours, expected)):
        assert_same(found, piece)
        assert torch.equal(same[number], found)
        matrix = (
            found.view(4, 7).t() if number == 0 else found.view(-1, n_species, (5, 131)[number - 1]).permute(1, 2, 0)
        )
        assert torch.equal(turned[number], matrix.flatten())
    for found, gradient in zip(torch.autograd.grad(ours, inputs, given), torch.autograd.grad(expected, inputs, given)):
        assert_same(found, gradient)


def test_matrices_of_strided_weights(monkeypatch):
    """Their places are kept for captured graphs, and during a capture no new ones can be written."""
    parts = [Matrix(False, 2, 3, 0, 0), Matrix(False, 3, 3, 6, 16)]
    matrices, ones, constants = Matrices(parts, 32, 1), torch.ones(1, 1, device=DEVICE), draw(1, 2)

    def made(weights):
        row, _ = matrices(weights, ones, constants)
        return torch.cat([row[:6], row[16:25]])

    def expected(weights):
        return torch.cat([constant * weight for constant, weight in zip(constants, weights)])

    sets = [[draw(2 * number, 6), draw(2 * number + 1, 9)] for number in range(1, 4)]
    assert_same(made(sets[0]), expected(sets[0]))
    kept = {key: places.starts.data_ptr() for key, places in matrices._offsets.items()}
    assert_same(made(sets[1]), expected(sets[1]))
    assert all(matrices._offsets[key].starts.data_ptr() == address for key, address in kept.items())
    monkeypatch.setattr("forgefield.kernels.dense.matrices.capturing", lambda: True)
    known = len(matrices._offsets)
    for weights in sets:
        assert_same(made(weights), expected(weights))
    assert len(matrices._offsets) == known


@pytest.mark.parametrize("case", ["degrees of unequal width", "parities, norm, resnet"])
def test_a_network_makes_the_same_of_plain_products(case, monkeypatch):
    """As it does where trainings compute products in less than float32."""
    potential, given = make_potential(precision="float64", **CASES[case]).to(DEVICE).eval(), batch()
    ours, our_gradients = step(potential, given, by_kernels=True)
    monkeypatch.setattr(nequip_passes, "is_lowered", lambda x: True)
    plain, plain_gradients = step(potential, given, by_kernels=True)
    for key in ("energy", "forces"):
        assert_same(ours[key], plain[key])
    for found, gradient in zip(our_gradients, plain_gradients):
        assert_same(found, gradient)


def test_trainings_in_tf32_use_it():
    rows, before = torch.zeros(1), torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert products.precision_of(rows, "tf32x3", "tf32") == "tf32"
        assert products.precision_of(rows.double(), "tf32x3", "tf32") == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert products.precision_of(rows, "tf32x3", "tf32") == "tf32x3"


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("where", ["features", "weights"])
def test_nan_is_passed_on(precision, where):
    """As GPUs write it: all bits are one but the sign."""
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32, device=DEVICE).view(torch.float32)
    arena, weights = draw(1, 2 * 4 * 8).float(), draw(2, 16).float()
    (arena if where == "features" else weights)[0] = nan[0]
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = precision
        ones = torch.ones(1, 1, device=DEVICE)
        _, packed = Matrices([Matrix(False, 4, 4, 0, 0)], 16, 1)([weights], ones, ones[0])
        products.Products([products.Product(1, 4, 4, 0, 4, 0, 4)]).make(arena, packed, None, 4, 0)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert arena[2 * 4 * 4 : 2 * 4 * 4 + 4].isnan().any()
