"""A training step of an LDOS network as a few kernels: one per layer and direction, and one of Adam per layer.

`kernels/dense/perceptron.py` has the kernels; here are their buffers, tiles and order. The forward kernels gather points, add
biases, apply activations and end with the slope of the loss; a backward kernel computes both products of its layer; Adam runs
concurrently with the next one and writes the weights in the layout of the kernels: padded, in bfloat16 where products are, and
for tf32 also transposed. Factors are rounded where `ManualGradient`, the oracle, rounds them. Only tf32 and bf16-mixed are
supported; `fused_obstacle` returns the reason if a step is not, and `GraphsEngine` then captures other steps.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgefield.ldos.loss import PointLoss
from forgefield.ldos.model import LDOSNetwork
from forgefield.ldos.training.data import RowLayout
from forgefield.ops.products import count_lowered
from forgefield.training.optim.captured_update import is_plain_adam
from forgefield.training.optim.update import Update

PADDED = 128
"""Rows and columns of matrices that kernels read are padded with zeros to a multiple of this."""
DERIVATIVE_FROM_VALUE = ("relu", "leakyrelu")
"""Activations whose derivative follows from their value, rounded or not."""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and launch options of the kernels. points, columns: of a tile of a product, columns at most. depth: of a
    piece of its sum. least: tiles become narrower until there are at least this many. block: entries per program of Adam."""

    points: int = 64
    columns: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 4
    least: int = 100
    block: int = 1024
    side: int = 32
    """Rows and columns per program of Adam if weights are also stored transposed."""
    concurrent_adam: bool = True
    """Run Adam concurrently with the next backward kernel."""
    rounds: bool = True
    """Round factors of tf32 to nearest; otherwise the device truncates them."""

    def shared(self, dtype: torch.dtype) -> int:
        """Shared memory of a product in bytes."""
        return self.stages * (self.points + self.columns) * self.depth * dtype.itemsize

    def width(self, n: int, others: int) -> int:
        """Columns of a tile if n columns are covered `others` times."""
        width = self.columns
        while width > 32 and others * -(-n // width) < self.least:
            width //= 2
        return width


TILES = {
    torch.bfloat16: (Tiles(depth=128, stages=3), Tiles(columns=64, stages=3)),
    torch.float32: (Tiles(columns=64, stages=3), Tiles(columns=64, depth=32, stages=3)),
}
"""By the type of the factors: the fastest on an H200, and one that fits into the shared memory of smaller GPUs."""


def tiles_for(dtype: torch.dtype, device: torch.device) -> Tiles:
    """The first of `TILES` that fits the device."""
    available = 0
    if device.type == "cuda":
        available = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return next((tiles for tiles in TILES[dtype] if tiles.shared(dtype) < available), TILES[dtype][-1])


def current_factor_dtype() -> torch.dtype | None:
    """Type of the factors of products in the current precision; None if the kernels do not support it."""
    lowered = count_lowered()
    if lowered is not None:
        return lowered if lowered == torch.bfloat16 else None
    return torch.float32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else None


def fused_obstacle(model: LDOSNetwork, precision: str, points: int) -> str | None:
    """Reason why fused kernels cannot be used for batches of `points` points, or None."""
    device = model.weights[0].device
    if precision not in ("tf32", "bf16-mixed"):
        return f"{precision} uses PyTorch's products"
    if model.dtype != torch.float32:
        return "weights are not float32"
    if len(set(model.options.activations[:-1])) > 1:
        return "hidden layers have different activations"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        return "they need an NVIDIA GPU from Ampere on"
    if not _fits(model, points):
        return f"they count entries of a matrix in 32 bits, too few for batches of {points} points"
    return None if importlib.util.find_spec("triton") is not None else "Triton is not installed"


def _fits(model: LDOSNetwork, points: int) -> bool:
    """Whether indices into every padded matrix fit into 32 bits."""
    widest = _padded(max(size for weight in model.weights for size in weight.shape))
    return max(_padded(points), widest) * widest < 2**31


def _padded(n: int) -> int:
    return -(-n // PADDED) * PADDED


class FusedStep:
    """Steps of up to `points` points. dtype: of factors, float32 (tf32) or bfloat16. update: applied after a gradient; Adam
    without clipping is computed by a kernel, everything else by `update` itself."""

    def __init__(
        self,
        model: LDOSNetwork,
        loss: PointLoss,
        layout: RowLayout,
        points: int,
        update: Update | None,
        dtype: torch.dtype,
        tiles: Tiles | None = None,
    ) -> None:
        self.model, self.loss, self.layout, self.points, self.dtype = model, loss, layout, points, dtype
        self.tiles = tiles or tiles_for(dtype, model.weights[0].device)
        self.update = update
        self._transposes = dtype == torch.float32
        """Whether factors are also stored transposed."""
        self._kernel_flags = {"TRANSPOSED": self._transposes, "ROUNDS": self._transposes and self.tiles.rounds}
        self.adam = None if update is None else adam_of(update)
        device = model.weights[0].device
        self.device, self._adam_stream = device, torch.cuda.Stream() if device.type == "cuda" else None
        self.gradients = [torch.zeros_like(p) for p in model.parameters()]
        count, padded_points = len(model.weights), _padded(points)
        self._weight_gradients, self._bias_gradients = self.gradients[:count], self.gradients[count:]
        self.widths = [model.weights[0].shape[1], *(bias.shape[0] for bias in model.biases)]
        self._values, self._values_t = self._padded_matrices([(padded_points, n) for n in self.widths[:-1]])
        self._slopes, self._slopes_t = self._padded_matrices([(padded_points, n) for n in self.widths[1:]])
        self._copies, self._copies_t = self._padded_matrices(
            [(weight.shape[0], weight.shape[1]) for weight in model.weights]
        )
        name = model.options.activations[0]
        self._stores_arguments = name not in DERIVATIVE_FROM_VALUE
        self._arguments = (
            [torch.zeros(v.shape, device=device) for v in self._values[1:]]
            if self._stores_arguments
            else self._values[1:]
        )
        self._columns = [
            torch.zeros(padded_points // self.tiles.points, s.shape[1], device=device) for s in self._slopes
        ]
        """Sums of slopes over each tile of points, (tiles, outputs) of each layer: partial sums of the gradients of biases."""
        self.sums = torch.zeros(padded_points // self.tiles.points, self.widths[-1], dtype=torch.float64, device=device)
        """Errors of the loss by level, accumulated for each tile of points until they are cleared."""
        self.refresh()

    def _padded_matrices(self, shapes: list[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
        """Padded matrices of factors, and their transposes; the same matrices if no transposes are stored."""
        matrices = [torch.zeros(_padded(n), _padded(k), dtype=self.dtype, device=self.device) for n, k in shapes]
        return matrices, [
            torch.zeros_like(matrix.t().contiguous()) for matrix in matrices
        ] if self._transposes else matrices

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights, after anything except these steps may have changed them."""
        for copy, transposed, weight in zip(self._copies, self._copies_t, self.model.weights):
            factor = rounded_to_tf32(weight) if self._kernel_flags["ROUNDS"] else weight
            copy[: weight.shape[0], : weight.shape[1]].copy_(factor)
            if self._transposes:
                transposed[: weight.shape[1], : weight.shape[0]].copy_(factor.t())

    def __call__(
        self, rows: Tensor, index: Tensor, factor: Tensor, weight: Tensor | None, numbers: Tensor | None
    ) -> None:
        """One step on rows[index]. factor, weight: as for `Gradient`. numbers: (groups, 4), see `Adam.numbers`; None: the
        caller applies the update and then calls `refresh`."""
        self._forwards(rows, index, factor, weight)
        for number in reversed(range(len(self._copies))):
            self._backwards(number)
            if numbers is not None:
                self._apply_adam(number, numbers)
        if numbers is None:
            self.complete_gradients()
        elif self._adam_stream is not None and self.tiles.concurrent_adam:
            torch.cuda.current_stream().wait_stream(self._adam_stream)

    def complete_gradients(self) -> None:
        """Complete `gradients`: Adam needs only partial sums of those of biases."""
        for columns, gradient in zip(self._columns, self._bias_gradients):
            torch.sum(columns[:, : len(gradient)], 0, out=gradient)

    def _forwards(self, rows: Tensor, index: Tensor, factor: Tensor, weight: Tensor | None) -> None:
        from forgefield.kernels.dense import perceptron as kernels

        tiles, widths, options, last = self.tiles, self.widths, self.model.options, len(self._copies) - 1
        launch = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        high = self._values[0].shape[0] // tiles.points
        launch |= {"BM": tiles.points, "BK": tiles.depth, **self._kernel_flags}
        common = {"NAME": options.activations[0], "KEEPS": self._stores_arguments, **launch}
        for number in range(last):
            x, y, w, n = self._values[number], self._values[number + 1], self._copies[number], widths[number + 1]
            x_t, y_t = self._values_t[number], self._values_t[number + 1]
            bias, arguments, wide = self.model.biases[number], self._arguments[number], tiles.width(n, high)
            grid = (high, -(-n // wide))
            if number:
                kernels.inner_layer[grid](
                    x, w, bias, y, y_t, arguments, n, widths[number], x.stride(0), w.stride(0), y.stride(0), y_t.stride(0),
                    BN=wide, **common,
                )  # fmt: skip
            else:
                kernels.first_layer[grid](
                    rows, index, w, bias, x, x_t, y, y_t, arguments, self.points, n, self.layout.targets_at, rows.stride(0),
                    w.stride(0), x.stride(0), y.stride(0), y_t.stride(0), BN=wide, **{**common, "BK": min(tiles.depth, 64)},
                )  # fmt: skip
        x, w, slope, n = self._values[last], self._copies[last], self._slopes[last], widths[-1]
        slope_t, wide = self._slopes_t[last], tiles.width(n, high)
        kernels.last_layer[(high, -(-n // wide))](
            x, w, self.model.biases[last], rows, index, factor if weight is None else weight, factor, slope, slope_t,
            self._columns[last], self.sums, self.points, n, widths[last], self.layout.targets_at, rows.stride(0), x.stride(0),
            w.stride(0), slope.stride(0), slope_t.stride(0), self.sums.stride(0), float(self.loss.delta),
            NAME=options.output_activation or "none", LOSS=self.loss.kind, WEIGHTED=weight is not None, BN=wide, **launch,
        )  # fmt: skip

    def _backwards(self, number: int) -> None:
        from forgefield.kernels.dense import perceptron as kernels

        tiles, n, k = self.tiles, self.widths[number + 1], self.widths[number]
        slope, slope_t = self._slopes[number], self._slopes_t[number]
        x, w = self._values_t[number], self._copies_t[number]
        arguments, below, below_t, columns = x, x, x, x
        if number:
            arguments, below, below_t = (
                self._arguments[number - 1],
                self._slopes[number - 1],
                self._slopes_t[number - 1],
            )
            columns = self._columns[number - 1]
        high, tall = slope.shape[0] // tiles.points, -(-n // tiles.points)
        slope_programs = high * -(-k // tiles.columns) if number else 0
        wide = tiles.width(k, tall) if tall * -(-k // tiles.columns) + slope_programs < tiles.least else tiles.columns
        weight_programs = tall * -(-k // wide)
        kernels.layer_backwards[(weight_programs + slope_programs,)](
            slope, slope_t, w, x, arguments, below, below_t, columns, self._weight_gradients[number], slope.shape[0], n, k,
            slope.stride(0), w.stride(0), x.stride(0), arguments.stride(0), slope_t.stride(0), weight_programs,
            NAME=self.model.options.activations[0], KEEPS=self._stores_arguments, **self._kernel_flags,
            BN=tiles.points, BK=wide, BP=tiles.depth, XM=tiles.points, XK=tiles.columns, XN=tiles.depth,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip

    def _apply_adam(self, number: int, numbers: Tensor) -> None:
        assert self.adam is not None
        if self._adam_stream is None or not self.tiles.concurrent_adam:
            self.adam(self, number, numbers)
            return
        self._adam_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._adam_stream):
            self.adam(self, number, numbers)


def rounded_to_tf32(values: Tensor) -> Tensor:
    """The nearest tf32 numbers, as float32; ties away from 0, NaN unchanged."""
    bits = (values.view(torch.int32) + 0x1000) & -0x2000
    return torch.where(values == values, bits.view(torch.float32), values)


class FusedGradient:
    """The gradient of a `FusedStep` as a `Gradient`, for comparisons. Rows must be packed in its layout."""

    def __init__(self, step: FusedStep) -> None:
        self.step, self.gradients = step, step.gradients

    def __call__(self, inputs: Tensor, targets: Tensor, factor: Tensor, weight: Tensor | None) -> Tensor:
        step = self.step
        rows = inputs.as_strided((len(inputs), step.layout.width), (inputs.stride(0), 1))
        step.sums.zero_()
        step(rows, torch.arange(len(inputs), device=inputs.device), factor, weight, None)
        return step.sums.sum(0)


class Adam:
    """The update of PyTorch's Adam and AdamW on the state of the optimiser, and of the average of the weights.

    Numbers that depend on the index of a step are computed on the host and read by the device; `count` advances the step
    counts of the optimiser.
    """

    def __init__(self, update: Update) -> None:
        self.update, self.optimiser = update, update.optimiser
        group = self.optimiser.param_groups[0]
        self.betas, self.eps, self.decay = group["betas"], group["eps"], group["weight_decay"]
        self.decoupled = isinstance(self.optimiser, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
        self._groups = {p: n for n, g in enumerate(self.optimiser.param_groups) for p in g["params"]}
        steps = {float(self.optimiser.state[p]["step"]) for p in self._groups}
        self._before = int(max(steps)) - update.calls
        """Steps of the optimiser before the first call of `update`."""

    def numbers(self, rates: Sequence[Sequence[float]], shares: Sequence[float]) -> Tensor:
        """(steps, groups, 4) float32, for the following steps: rate, rate over the correction of the first moment, one over the
        root of that of the second, share of the average."""
        beta1, beta2 = self.betas
        numbers = []
        for offset, (group_rates, share) in enumerate(zip(rates, shares), 1):
            step = self._before + self.update.calls + offset
            first, second = 1 - beta1**step, (1 - beta2**step) ** 0.5
            numbers.append([[rate, rate / first, 1 / second, share] for rate in group_rates])
        return torch.tensor(numbers, dtype=torch.float64).to(torch.float32)

    def count(self, steps: int) -> None:
        """Count `steps` executed steps."""
        self.update.calls += steps
        torch._foreach_add_([self.optimiser.state[p]["step"] for p in self._groups], float(steps))

    def __call__(self, step: FusedStep, number: int, numbers: Tensor) -> None:
        from forgefield.kernels.dense import perceptron as kernels

        model, average = step.model, self.update.average
        tensors: list[Any] = []
        for kind, parameter in (("weights", model.weights[number]), ("biases", model.biases[number])):
            state = self.optimiser.state[parameter]
            mean = parameter if average is None else average.average[f"{kind}.{number}"]
            tensors += [parameter, state["exp_avg"], state["exp_avg_sq"], mean]
        group_numbers = [numbers[self._groups[parameters[number]]] for parameters in (model.weights, model.biases)]
        (n, k), copy, copy_t = model.weights[number].shape, step._copies[number], step._copies_t[number]
        columns, block, side = step._columns[number], step.tiles.block, step.tiles.side
        of_weights = -(-n // side) * -(-k // side) if step._transposes else -(-n * k // block)
        kernels.adam_on_layer[(of_weights + -(-n // block),)](
            *tensors, step._weight_gradients[number], columns, copy, copy_t, n, k, copy.stride(0), copy_t.stride(0),
            columns.stride(0), len(columns), *group_numbers, self.betas[0], 1 - self.betas[0], self.betas[1], 1 - self.betas[1],
            self.eps, self.decay, of_weights, DECOUPLED=self.decoupled, AVERAGED=average is not None, **step._kernel_flags,
            SIDE=side, BLOCK=block, num_warps=4,
        )  # fmt: skip


def adam_of(update: Update) -> Adam | None:
    """The kernel that replaces an update of plain Adam or AdamW; None for any other update."""
    optimiser, same = update.optimiser, ("betas", "eps", "weight_decay")
    groups = optimiser.param_groups
    if not is_plain_adam(optimiser) or update.clip[0] or update.reduce is not None or not update.has_states:
        return None
    if any(group[key] != groups[0][key] for group in groups for key in same):
        return None
    states = [optimiser.state[p] for group in groups for p in group["params"]]
    same_count = len({float(state["step"]) for state in states}) == 1
    return Adam(update) if same_count and all(p.is_contiguous() for p in update.average_and_weights()) else None
