"""Which rows an epoch visits, and in which order.

An order depends on (seed, epoch) and on nothing else: neither on workers and ranks, nor on the epochs before it. It is
read from the raw Philox stream, which NumPy keeps the same in all versions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from forgefield.errors import ForgefieldError

BLOCK = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*:\s*([^:\s]+)\s*")
UNIFORM, SIZE = ("uniform", "prob_uniform"), ("size", "prob_sys_size")
# The three things drawn for an epoch of weighted draws. Zero would give the stream that has no such key.
ROUNDING, WITHIN, TOGETHER = 1, 2, 3


def seeded_permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of 0..n-1 fixed by the integers in `key`."""
    chance = _raw(n, *key)
    order = np.argsort(chance)  # much faster than a stable sort, which it equals where no number comes twice
    drawn = chance[order]
    return order if (drawn[1:] != drawn[:-1]).all() else np.argsort(chance, kind="stable")


def epoch_permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Order of n frames in an epoch, (n,) int64."""
    return seeded_permutation(n, seed, epoch)


def _raw(n: int, *key: int) -> np.ndarray:
    """The first n numbers of the stream that belongs to `key`, (n,) uint64."""
    entropy = [int(k) & (2**64 - 1) for k in key]
    return np.random.Philox(np.random.SeedSequence(entropy)).random_raw(n)


class EpochOrder(Protocol):
    """What a loader asks of an order: how many rows an epoch has, which they are, and whether batches are made already."""

    @property
    def draws(self) -> int: ...

    def rows(self, epoch: int) -> np.ndarray: ...

    def batches(self, epoch: int) -> np.ndarray | None:
        """Where batches begin and the last one ends in the rows of that epoch, (n_batches + 1,); None: anywhere."""


class EveryFrameOnce:
    """Each of n rows once per epoch, in order or in a new random order."""

    def __init__(self, n: int, seed: int = 0, shuffle: bool = True) -> None:
        self.draws = int(n)
        self.seed = int(seed)
        self.shuffle = shuffle

    def rows(self, epoch: int) -> np.ndarray:
        """Rows of that epoch, (draws,) int64."""
        if self.shuffle:
            return epoch_permutation(self.draws, self.seed, epoch)
        return np.arange(self.draws)

    def batches(self, epoch: int) -> None:
        return None


class WeightedDraws:
    """`draws` rows an epoch, of each system in proportion to its probability.

    In every epoch a system is drawn either the whole number below or the whole number above `draws` times its
    probability, such that the average over epochs is exactly that product. Inside a system no row is drawn a second time
    before all have been drawn once; which rows come once more than others is fresh every epoch.

    system_of_row: (n,) system each row belongs to. probabilities: (n_systems,), normalised here. names: of the systems.
    """

    def __init__(
        self,
        system_of_row: np.ndarray,
        probabilities: np.ndarray,
        draws: int,
        seed: int = 0,
        names: Sequence[str] | None = None,
    ) -> None:
        systems = np.asarray(system_of_row, dtype=np.int64)
        self.draws = int(draws)
        self.seed = int(seed)
        self._rows = np.argsort(systems, kind="stable")
        self._system = systems[self._rows]
        self._sizes = np.bincount(systems, minlength=len(probabilities))
        self._first = np.cumsum(self._sizes) - self._sizes
        self._chances = Chances(probabilities, self._sizes, self.draws, self.seed, names)

    def counts(self, epoch: int) -> np.ndarray:
        """How often each system is drawn in that epoch, (n_systems,) int64, `draws` in all."""
        return self._chances.counts(epoch)

    def rows(self, epoch: int) -> np.ndarray:
        """Rows of that epoch, (draws,) int64."""
        shuffled = self._rows[shuffle_within(self._system, len(self._sizes), self.seed, epoch)]
        return shuffled[drawn_in_turn(self.counts(epoch), self._first, self._sizes, self.seed, epoch)]

    def batches(self, epoch: int) -> None:
        return None


class Chances:
    """How often each system is drawn in an epoch: the whole number below or above its probability times `draws`.

    probabilities: (n_systems,), normalised here. sizes: (n_systems,) what there is to draw. names: of the systems.
    """

    def __init__(
        self, probabilities: np.ndarray, sizes: np.ndarray, draws: int, seed: int, names: Sequence[str] | None
    ) -> None:
        chances = np.asarray(probabilities, dtype=np.float64)
        if draws < 1:
            raise ForgefieldError(f"an epoch must have at least one draw, not {draws}")
        if len(sizes) > len(chances):
            raise ValueError(f"rows belong to systems 0..{len(sizes) - 1}; there are {len(chances)}")
        if not (np.isfinite(chances).all() and (chances >= 0).all() and chances.sum() > 0):
            raise ValueError("probabilities of systems must be at least 0, and not all of them 0")
        hollow = np.flatnonzero((chances > 0) & (sizes == 0))
        if len(hollow):
            first = hollow[0]
            name = f"system {first}, counted from 0," if names is None else f"{names[first]}"
            raise ForgefieldError(
                f"{name} is to be drawn with probability {chances[first] / chances.sum():.3g} but has no frame to train on "
                f"({len(hollow)} such sources); give it frames or probability 0"
            )
        self.draws, self.seed = draws, seed
        self._until = np.cumsum(chances) / np.cumsum(chances)[-1]

    def counts(self, epoch: int) -> np.ndarray:
        """(n_systems,) int64, `draws` in all; on average over epochs exactly the probabilities times `draws`."""
        offset = float(_raw(1, self.seed, epoch, ROUNDING)[0] >> np.uint64(11)) * 2.0**-53
        until = np.minimum(np.floor(self._until * self.draws + offset).astype(np.int64), self.draws)
        return np.diff(until, prepend=0)


def drawn_in_turn(counts: np.ndarray, first: np.ndarray, sizes: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Numbers first[s], first[s] + 1, ... of each system, counts[s] of them and again from the first after sizes[s], mixed."""
    draws = int(counts.sum())
    drawn = np.repeat(np.arange(len(counts)), counts)
    turn = np.arange(draws) - np.repeat(np.cumsum(counts) - counts, counts)
    numbers = first[drawn] + turn % sizes[drawn]
    return numbers[seeded_permutation(draws, seed, epoch, TOGETHER)]


def shuffle_within(system: np.ndarray, n_systems: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of rows sorted by system, (n,), that leaves each within its system."""
    # One sort for all systems: the system in the upper bits of the key, chance in the others.
    bits = max(1, n_systems - 1).bit_length()
    chance = _raw(len(system), seed, epoch, WITHIN) >> np.uint64(bits)
    return np.argsort(chance | (system.astype(np.uint64) << np.uint64(64 - bits)), kind="stable")


def system_probabilities(
    rule: str | Sequence[float],
    sizes: Sequence[int] | np.ndarray,
    shares: Sequence[float | None] | None = None,
    *,
    setting: str = "data.sampling",
) -> np.ndarray:
    """Probability of each system in a draw, (n_systems,) float64, sum 1.

    rule:   `uniform` (as DeePMD-kit's `prob_uniform`): every system alike.
            `size` (`prob_sys_size`): in proportion to `sizes`.
            `prob_sys_size;0:2:0.5;2:5:0.5`: blocks of systems start:stop:weight; a block gets its weight, the systems inside
            it divide that by size. Every system is in one block.
            A list of numbers, one for each system, which are normalised; where some are negative, the others are
            probabilities as they stand and the negative ones divide the rest by size.
    sizes:  (n_systems,) frames of each system.
    shares: for each system the requested probability, or None. Those with None divide the rest by `rule`.
    setting: name of the option in messages.
    A system without a frame, for example because all of them validate, is never drawn; if it has a share, that is an error.
    """
    sizes = np.asarray(sizes, dtype=np.float64)
    if sizes.ndim != 1 or len(sizes) == 0:
        raise ForgefieldError(f"{setting}={rule!r:.80}: there is no system to draw from")
    explicit = shares is not None and any(share is not None for share in shares)
    if isinstance(rule, str) and rule.strip() in UNIFORM + SIZE:
        weights = (sizes > 0).astype(np.float64) if rule.strip() in UNIFORM else sizes
        if not explicit:
            return _normalised(weights, f"{setting}={rule}")
        return _divide(_share_column(shares or (), len(sizes)), weights, "share")
    if explicit:
        raise ForgefieldError(f"{setting}={rule!r:.80} and sources with a `share` contradict each other; give only one")
    if isinstance(rule, str):
        return _blocks(rule, sizes, setting)
    if not hasattr(rule, "__iter__"):
        raise _unknown(f"{setting}={rule!r:.80}")
    column = _numbers(rule, len(sizes), setting)
    return _divide(np.where(column < 0, np.nan, column), sizes, setting)


def _unknown(where: str) -> ForgefieldError:
    return ForgefieldError(
        f"{where} is not a rule; it must be uniform, size, a list of numbers with one for each system, or blocks such as "
        "'prob_sys_size;0:2:0.5;2:5:0.5'"
    )


def _share_column(shares: Sequence[float | None], n: int) -> np.ndarray:
    """Explicit shares with NaN where there is none, (n,)."""
    is_set = [share is not None for share in shares]
    column = _numbers([share if share is not None else 0.0 for share in shares], n, "share")
    if (column < 0).any():
        at = int(np.flatnonzero(column < 0)[0])
        raise ForgefieldError(f"share={column[at]:g} of system {at} (counted from 0) is negative; it must be 0 or more")
    return np.where(is_set, column, np.nan)


def _numbers(values: Sequence[float], n: int, setting: str) -> np.ndarray:
    """The values as finite numbers, one for each of n systems."""
    try:
        column = np.array([_number(value) for value in values])
    except (TypeError, ValueError):
        raise ForgefieldError(
            f"{setting} must be a list of finite numbers, one for each system, not {values!r:.80}"
        ) from None
    if len(column) != n:
        raise ForgefieldError(f"{setting} has {len(column)} numbers for {n} systems; it needs one for each")
    return column


def _number(value: float) -> float:
    if isinstance(value, bool | str) or not math.isfinite(value):
        raise ValueError(value)
    return float(value)


def _divide(shares: np.ndarray, weights: np.ndarray, setting: str) -> np.ndarray:
    """The probabilities `shares`; where they are NaN, the rest in proportion to `weights`."""
    open_ = np.isnan(shares)
    if not open_.any():
        return _normalised(shares, setting)
    taken = shares[~open_].sum()
    if taken >= 1 - 1e-8:
        raise ForgefieldError(
            f"{setting}: the probabilities given add up to {taken:.6g} and leave nothing for the {open_.sum()} systems "
            "without one; they should add up to less than 1"
        )
    rest = _normalised(np.where(open_, weights, 0.0), setting)
    return np.where(open_, (1 - taken) * rest, shares)


def _normalised(weights: np.ndarray, setting: str) -> np.ndarray:
    total = weights.sum()
    if not total > 0:
        raise ForgefieldError(f"{setting}: all systems would have probability 0; at least one should have more")
    return weights / total


def _blocks(rule: str, sizes: np.ndarray, setting: str) -> np.ndarray:
    """Probabilities by DeePMD-kit's block rule, 'prob_sys_size;start:stop:weight;...'."""
    name, *blocks = rule.split(";")
    where = f"{setting}={rule!r}"
    if name.strip() not in SIZE or not blocks:
        raise _unknown(where)
    weights: list[float] = []
    block_of = np.full(len(sizes), -1)
    for block in blocks:
        start, stop, weight = _block(block, len(sizes), where)
        taken = np.flatnonzero(block_of[start:stop] >= 0)
        if len(taken):
            raise ForgefieldError(f"{where}: system {start + taken[0]} is in two blocks; it must be in one")
        block_of[start:stop] = len(weights)
        if weight > 0 and not sizes[start:stop].sum() > 0:
            raise ForgefieldError(f"{where}: the block '{block.strip()}' has a weight but no frame")
        weights.append(weight)
    if (block_of < 0).any():
        first = int(np.flatnonzero(block_of < 0)[0])
        raise ForgefieldError(
            f"{where}: system {first} is in no block; blocks should cover all ({first}:{first + 1}:0 leaves it out)"
        )
    totals = np.bincount(block_of, weights=sizes)
    inside = sizes / np.where(totals > 0, totals, 1.0)[block_of]
    return _normalised(np.array(weights), where)[block_of] * inside


def _block(text: str, n: int, where: str) -> tuple[int, int, float]:
    match = BLOCK.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        start, stop, weight = int(match[1]), int(match[2]), _number(float(match[3]))
    except ValueError:
        raise ForgefieldError(f"{where}: '{text.strip()}' is not a block start:stop:weight, such as 0:2:0.5") from None
    if not start < stop <= n:
        raise ForgefieldError(f"{where}: the block '{text.strip()}' does not lie within the {n} systems 0:{n}")
    if weight < 0:
        raise ForgefieldError(f"{where}: the block '{text.strip()}' has a negative weight; it must be 0 or more")
    return start, stop, weight
