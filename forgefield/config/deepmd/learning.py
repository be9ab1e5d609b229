"""The sections `learning_rate` and `optimizer`."""

from __future__ import annotations

from typing import Any

from forgefield.config.deepmd.section import MISSING, Section
from forgefield.errors import ForgefieldError

SCHEDULES = {"exp": "exp", "cosine": "cosine_to", "wsd": "wsd"}
"""DeePMD-kit's name of a schedule -> Forgefield's."""
LAST_RATE = 5e-8
"""Default of DeePMD-kit for the last learning rate."""
OPTIMISERS = {"Adam": "adam", "AdamW": "adamw"}
BETAS = (0.9, 0.999)
OTHER_OPTIMISERS = ("LKF", "AdaMuon", "HybridMuon")


def translate_learning_rate(section: Section | None, file: object, steps: int | None) -> dict[str, Any]:
    """`lr`, `scheduler` and `scale_lr` of the section `training`. steps: of the run, if the input sets them."""
    if section is None:
        raise ForgefieldError(f"{file}: 'learning_rate' is missing; it needs at least start_lr.")
    start = section.number("start_lr", MISSING, above=0)
    kind = section.choice("type", "exp", tuple(SCHEDULES))
    options = {"name": SCHEDULES[kind], **_options_of_kind(section, kind), **_last_rate(section, start, kind)}
    options |= _warm_up(section, steps)
    scale = section.take("scale_by_worker", "none")
    if scale not in ("linear", "sqrt", "none"):
        raise section.wrong("scale_by_worker", scale, "linear, sqrt or none")
    section.finish()
    return {"lr": start, "scale_lr": scale, "scheduler": options}


def _options_of_kind(section: Section, kind: str) -> dict[str, Any]:
    if kind == "exp":
        options = {
            "decay_steps": section.integer("decay_steps", 5000, at_least=1),
            "decay_rate": section.number("decay_rate", above=0, at_most=1),
            "smooth": section.flag("smooth") or None,
        }
    elif kind == "wsd":
        options = {
            "decay_phase_ratio": section.number("decay_phase_ratio", 0.1, above=0, at_most=1),
            "decay_type": section.choice("decay_type", "inverse_linear", ("inverse_linear", "cosine", "linear")),
        }
    else:
        options = {}
    return {name: value for name, value in options.items() if value is not None}


def _last_rate(section: Section, start: float, kind: str) -> dict[str, Any]:
    stop = section.number("stop_lr", at_least=0, at_most=start)
    ratio = section.number("stop_lr_ratio", at_least=0, at_most=1)
    if stop is not None and ratio is not None:
        raise section.refused("stop_lr_ratio", "and 'learning_rate.stop_lr' say the same thing; keep one")
    if kind == "wsd" and 0.0 in (stop, ratio):
        raise section.wrong("stop_lr" if stop == 0 else "stop_lr_ratio", 0, "above 0 for wsd")
    if ratio is not None:
        return {"stop_lr_ratio": ratio}
    return {"stop_lr": min(LAST_RATE, start) if stop is None else stop}


def _warm_up(section: Section, steps: int | None) -> dict[str, Any]:
    length = section.integer("warmup_steps", at_least=0) or None
    ratio = section.number("warmup_ratio", at_least=0, below=1)
    factor = section.number("warmup_start_factor", at_least=0, at_most=1) or None
    if length is not None and ratio is not None:
        raise section.refused("warmup_ratio", "and 'learning_rate.warmup_steps' say the same thing; keep one")
    if steps is not None and length is not None and length >= steps:
        raise section.wrong("warmup_steps", length, f"less than the {steps} steps of the run")
    options = {"warmup_steps": length, "warmup_ratio": ratio, "warmup_start_factor": factor}
    return {name: value for name, value in options.items() if value is not None}


def translate_optimiser(section: Section | None) -> dict[str, Any]:
    """Our `training.optimizer`."""
    if section is None:
        return {"name": "adam"}
    kind = section.take("type", "Adam")
    if kind in OTHER_OPTIMISERS:
        raise section.refused("type", f"is {kind}, which is not supported; supported are {' and '.join(OPTIMISERS)}")
    if kind not in tuple(OPTIMISERS):
        raise section.wrong("type", kind, " or ".join(OPTIMISERS))
    betas = [section.number(f"adam_beta{i}", default, at_least=0, below=1) for i, default in enumerate(BETAS, start=1)]
    decay = section.number("weight_decay", at_least=0)
    if kind == "AdamW" and decay is None:
        # Its documentation says 0.001, but what runs in version 3.2 is 0.
        decay = 0.0
        section.notes[section.path("weight_decay")] = "0 for AdamW where it is not given, as DeePMD-kit 3.2 does."
    section.finish()
    options: dict[str, Any] = {"name": OPTIMISERS[kind]}
    if tuple(betas) != BETAS:
        options["betas"] = betas
    if decay or kind == "AdamW":
        options["weight_decay"] = decay
    return options
