"""Where memory runs out: says which batch it was and what to do about it, or computes the batch in parts.

The loss is sums over frames divided by denominators that are known beforehand, so the gradients of the parts, each with the
denominators of the whole, add up to exactly those of the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from forgefield.data.batch import SHAPES, Shapes, halves, is_memory_error
from forgefield.errors import ForgefieldError
from forgefield.training.engines.blank import sizes
from forgefield.training.engines.engine import Denominators, Engine, Step
from forgefield.training.engines.step import Differentiated, Measured

Batch = dict[str, Tensor]


class SparingEngine(Engine):
    """inner: does the work. parts: into which every batch is cut. split: whether a batch that does not fit is cut further."""

    def __init__(
        self, inner: Engine, *, parts: int = 1, split: bool, notify: Callable[[str], None] = lambda text: None
    ) -> None:
        super().__init__(inner.function, world_size=inner.world_size)
        self.inner, self.parts, self.split, self.notify = inner, parts, split, notify
        self.name = inner.name
        self.most_edges: int | None = None
        """Batches with more edges than this have not fitted."""

    def step(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        if self.split or self.parts > 1:
            return self._given(self.differentiate(batch, denominators))
        try:
            return self.inner.step(batch, denominators)
        except Exception as error:
            raise_if_memory(error, batch)
            raise

    def measure(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        if self.split or self.parts > 1:
            return super().measure(batch, denominators)
        try:
            return self.inner.measure(batch, denominators)
        except Exception as error:
            raise_if_memory(error, batch)
            raise

    def differentiate(self, batch: Batch, denominators: Denominators | None = None) -> Differentiated:
        known = self.function.task.counts(batch) if denominators is None else denominators()
        results = [self._in_parts(part, known) for part in cut(batch, self.parts, self.function.shapes)]
        return functools.reduce(_added, results)

    def evaluate(self, batch: Batch) -> Measured:
        """In parts where memory runs out: what is measured are sums over frames."""
        try:
            return self.inner.evaluate(batch)
        except Exception as error:
            if not is_memory_error(error) or sizes(batch)[0] == 1:
                raise_if_memory(error, batch, evaluating=True)
                raise
        _give_back_memory()
        first, second = (self.evaluate(part) for part in halves(batch, self.function.shapes))
        return _both(first, second)

    def forget(self) -> None:
        self.inner.forget()

    def _in_parts(self, batch: Batch, known: Tensor) -> Differentiated:
        n_edges, n_frames = sizes(batch)[2], sizes(batch)[0]
        if self.most_edges is None or n_edges < self.most_edges or n_frames == 1:
            try:
                return _own(self.inner.differentiate(batch, lambda: known))
            except Exception as error:
                if not is_memory_error(error) or n_frames == 1 or not self.split:
                    raise_if_memory(error, batch)
                    raise
        _give_back_memory()
        if self.most_edges is None or n_edges < self.most_edges:
            self.most_edges = n_edges
            self.notify(
                f"A batch of {describe(batch)} does not fit into memory: it is computed in parts, with the same gradients."
            )
        first, second = (self._in_parts(part, known) for part in halves(batch, self.function.shapes))
        return _added(first, second)


def _give_back_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _own(result: Differentiated) -> Differentiated:
    """A copy that the next step does not overwrite."""
    return Differentiated(
        [None if gradient is None else gradient.clone() for gradient in result.gradients],
        result.loss.clone(),
        Measured(result.measured.sums.clone(), result.measured.errors.clone()),
    )


def _added(a: Differentiated, b: Differentiated) -> Differentiated:
    gradients = [x if y is None else y if x is None else x + y for x, y in zip(a.gradients, b.gradients)]
    return Differentiated(gradients, a.loss + b.loss, _both(a.measured, b.measured))


def _both(a: Measured, b: Measured) -> Measured:
    return Measured(a.sums + b.sums, a.errors + b.errors)


def cut(batch: Batch, parts: int, shapes: Shapes = SHAPES) -> list[Batch]:
    """The batch in so many parts, or in as many as it has frames, of about as many atoms each."""
    frames = batch["n_atoms"].shape[0]
    if parts <= 1 or frames == 1:
        return [batch]
    first, second = halves(batch, shapes)
    share = max(1, round(parts * first["positions"].shape[0] / batch["positions"].shape[0]))
    share = min(share, parts - 1)
    return [*cut(first, share, shapes), *cut(second, parts - share, shapes)]


def describe(batch: Batch) -> str:
    frames, atoms, edges = sizes(batch)
    return f"{frames} frames, {atoms} atoms and {edges} edges"


def raise_if_memory(error: BaseException, batch: Batch, *, evaluating: bool = False) -> None:
    """One sentence for an error that means that memory ran out; nothing for any other."""
    if not is_memory_error(error):
        return
    what = "data.eval_batch" if evaluating else "data.batch"
    more = (
        ""
        if evaluating
        else ", or have it computed in parts with the same gradients: training.memory.parts=2, or training.memory.split=true"
    )
    raise ForgefieldError(
        f"Memory ran out on a batch of {describe(batch)}. Make {what} smaller (by edges, {what}={{edges: ...}}, batches cost "
        f"alike){more}; forgefield bench CONFIG --plan estimates what fits."
    ) from error
