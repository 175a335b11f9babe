"""Optimizers by name, their state as a checkpoint holds it, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from varlen.errors import SettingError
from varlen.missing import installation
from varlen.train.settings import OptimizerSettings


class Optimizer:
    """One or several optimizers of torch, each with parameters of its own."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = tuple(parts)
        self._of = {
            parameter: part
            for part in self._parts
            for group in part.param_groups
            for parameter in group["params"]
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of all parts."""
        return [group for part in self._parts for group in part.param_groups]

    def step(self, learning_rate: float) -> None:
        """Update all parameters that have gradients."""
        for group in self.param_groups:
            if isinstance(group["lr"], torch.Tensor):  # of torchao
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate
        for part in self._parts:
            part.step()

    def zero_grad(self) -> None:
        """Free all gradients."""
        for part in self._parts:
            part.zero_grad()

    def state_of(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """Return the state of a parameter; one that wasn't updated yet gets the state that its first update makes."""
        part = self._of[parameter]
        if not part.state[parameter]:
            part.state[parameter].update(_initial_state(part, parameter))
        state: dict[str, Any] = part.state[parameter]
        return state


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter],
    settings: OptimizerSettings,
    device: torch.device,
    embeddings: Collection[str] = (),
) -> Optimizer:
    """Return the optimizer of a run, of which only matrices decay.

    Args:
        parameters: by the model's names.
        settings: of the run.
        device: on which they are.
        embeddings: names of embeddings and output heads, which "muon" updates by AdamW.
    """
    held = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if settings.name == "muon":
        matrices = {name: p for name, p in held.items() if p.ndim == 2 and name not in embeddings}
        others = {name: p for name, p in held.items() if name not in matrices}
        return Optimizer(
            [
                *([_muon(matrices, settings)] if matrices else []),
                *([_adamw(others, settings, device)] if others else []),
            ]
        )
    if settings.name == "adafactor":
        return Optimizer([_adafactor(held, settings)])
    if settings.name == "adamw_8bit":
        return Optimizer([_adamw_8bit(held, settings)])
    return Optimizer([_adamw(held, settings, device)])


def _adamw(
    parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerSettings, device: torch.device
) -> torch.optim.Optimizer:
    fused = device.type in ("cpu", "cuda")
    return torch.optim.AdamW(
        _groups(parameters, settings),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=fused,
        foreach=None if fused else True,
    )


def _muon(parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    # Updates as large as AdamW's (Liu et al. 2025, arXiv 2502.16982), so that one learning rate serves both.
    return torch.optim.Muon(
        _groups(parameters, settings),
        lr=settings.learning_rate,
        momentum=settings.momentum,
        adjust_lr_fn="match_rms_adamw",
    )


def _adafactor(
    parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerSettings
) -> torch.optim.Optimizer:
    _check_whole(parameters, settings)
    return torch.optim.Adafactor(_groups(parameters, settings), lr=settings.learning_rate)


def _adamw_8bit(
    parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerSettings
) -> torch.optim.Optimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise SettingError(
            f'optimizer.name = "adamw_8bit" needs torchao, which isn\'t installed; install it '
            f'({installation("torchao")}), or set optimizer.name = "adamw"'
        ) from None
    _check_whole(parameters, settings)
    made: torch.optim.Optimizer = AdamW8bit(
        _groups(parameters, settings),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )
    return made


def _check_whole(parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerSettings) -> None:
    """Refuse parameters that are divided among processes, whose state this optimizer can't divide."""
    divided = next((name for name, p in parameters.items() if isinstance(p, DTensor)), None)
    if divided is not None:
        raise SettingError(
            f'optimizer.name = "{settings.name}" can\'t divide its state among processes, and {divided} is divided; '
            'set run.parallel = "ddp" without [plan], or optimizer.name = "adamw"'
        )


def _groups(
    parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerSettings
) -> list[dict[str, Any]]:
    """Return groups of parameters: matrices decay, and a fused update takes tensors of one mesh."""
    groups: dict[tuple[bool, Any], list[torch.nn.Parameter]] = {}
    for parameter in parameters.values():
        mesh = getattr(parameter, "device_mesh", None)
        groups.setdefault((parameter.ndim < 2, mesh), []).append(parameter)
    return [
        {"params": held, "weight_decay": 0.0 if is_vector else settings.weight_decay}
        for (is_vector, _), held in sorted(groups.items(), key=lambda group: group[0][0])
    ]


# The state of a parameter, as named tensors and a number of steps.

STEP = "step"


def named_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a parameter's state, without its step; those made of several tensors by their parts."""
    for name, value in state.items():
        if name == STEP or not isinstance(value, torch.Tensor):
            continue
        inner = () if isinstance(value, DTensor) else _inner_names(value)
        if inner:
            yield from ((f"{name}.{part}", getattr(value, part)) for part in inner)
        else:
            yield name, value


def _inner_names(value: torch.Tensor) -> Sequence[str]:
    """Return the names of the tensors that a tensor of another type, such as a quantized one, is made of."""
    flatten = getattr(value, "__tensor_flatten__", None)
    return () if type(value) is torch.Tensor or flatten is None else flatten()[0]


def put_step(state: dict[str, Any], step: float) -> None:
    """Set the step of a parameter's state."""
    if isinstance(state[STEP], torch.Tensor):
        state[STEP].fill_(step)
    else:
        state[STEP] = step


def _initial_state(part: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, Any]:
    """Return the state that a parameter has before its first update."""
    if isinstance(part, torch.optim.Muon):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    if isinstance(part, torch.optim.Adafactor):
        step = torch.zeros(())
        if parameter.ndim < 2:
            return {STEP: step, "variance": torch.zeros_like(parameter)}
        means = parameter.detach()
        return {
            STEP: step,
            "row_var": torch.zeros_like(means.narrow(-1, 0, 1)),
            "col_var": torch.zeros_like(means.narrow(-2, 0, 1)),
        }
    if not isinstance(part, torch.optim.AdamW):
        new: Any = part._new_buffer  # type: ignore[attr-defined] # of torchao
        return {STEP: torch.zeros(()), "exp_avg": new(parameter, True), "exp_avg_sq": new(parameter, False)}
    is_fused = bool(part.param_groups[0].get("fused"))
    return {
        STEP: torch.zeros((), device=parameter.device if is_fused else "cpu"),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def state_bytes(
    parameters: Mapping[str, torch.nn.Parameter],
    settings: OptimizerSettings,
    embeddings: Collection[str] = (),
) -> dict[str, int]:
    """Return the bytes that the optimizer of a run keeps of each parameter that is trained, without its step.

    Args:
        parameters: by the model's names, in float32, on "meta".
        settings: of the run.
        embeddings: as `make_optimizer` takes them.
    """
    optimizer = make_optimizer(parameters, settings, torch.device("meta"), embeddings)
    return {
        name: sum(each.nbytes for _, each in named_tensors(optimizer.state_of(parameter)))
        for name, parameter in parameters.items()
        if parameter.requires_grad
    }


def learning_rate(step: int, steps: int | None, settings: OptimizerSettings) -> float:
    """Return the learning rate of a step.

    >>> settings = OptimizerSettings(learning_rate=1.0, schedule="linear", warmup_steps=2)
    >>> [learning_rate(step, 6, settings) for step in range(1, 7)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    >>> settings = OptimizerSettings(learning_rate=1.0, schedule="wsd", decay_share=0.5)
    >>> [learning_rate(step, 8, settings) for step in range(1, 9)]
    [1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    highest, lowest = settings.learning_rate, settings.min_learning_rate
    warmup = settings.warmup_steps or round(settings.warmup_share * (steps or 0))
    if step <= warmup:
        return highest * step / warmup
    if settings.schedule == "constant" or steps is None:
        return highest
    falls_after = warmup
    if settings.schedule == "wsd":
        falls_after = max(warmup, steps - math.ceil(settings.decay_share * steps))
    passed = min(max(step - falls_after, 0) / max(steps - falls_after, 1), 1.0)
    if settings.schedule == "cosine":
        return lowest + (highest - lowest) * (1 + math.cos(math.pi * passed)) / 2
    return lowest + (highest - lowest) * (1 - passed)
