"""What `varlen plan` is told of a job, as objects: token counts, the mesh, the model, the hardware."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from varlen.errors import SettingError
from varlen.parsed import parse_json

if TYPE_CHECKING:
    from varlen.cost.hardware import Hardware
    from varlen.cost.shape import ModelShape
    from varlen.step_plan import Mesh, Sharding


def mesh_of(
    *,
    gpus: int | None,
    dp: int | None,
    pp: int,
    cp: int,
    tp: int,
    virtual_stages: int,
    sharding: Sharding,
) -> Mesh:
    """Return the mesh: data-parallel ranks are what the other axes leave of the GPUs.

    Args:
        gpus: as given; None: what the axes come to, 8 where dp isn't given either.
        dp: as given; None: what is left.
        pp: pipeline stages.
        cp: GPUs that share every document.
        tp: GPUs that share every layer.
        virtual_stages: chunks of a stage.
        sharding: what data-parallel ranks divide.

    Raises:
        SettingError: the axes don't divide the GPUs; names the numbers that would.
    """
    from varlen.step_plan import Mesh

    rest = prod(max(axis, 1) for axis in (pp, cp, tp))
    if gpus is not None and gpus < 1:
        raise SettingError(f"--gpus must be at least 1; got {gpus}")
    total = gpus if gpus is not None else rest * dp if dp is not None else max(8, rest)
    words = f"pp {pp} x cp {cp} x tp {tp} = {rest:,}"
    if dp is not None and dp * rest != total:
        raise SettingError(
            f"dp {dp} x {words.replace(f'= {rest:,}', f'= {dp * rest:,}')} GPUs, but --gpus says {total:,}; "
            "leave out --gpus or --dp"
        )
    if total % rest:
        below, above = total - total % rest, total - total % rest + rest
        near = f"{below:,} or {above:,}" if below else f"{above:,}"
        raise SettingError(
            f"{total:,} GPUs can't be divided into pipelines of {words} GPUs; {near} GPUs can, or axes whose "
            f"product divides {total:,}"
        )
    axes = {"pp": pp, "cp": cp, "tp": tp, "virtual_stages": virtual_stages}
    return Mesh(dp=total // rest, sharding=sharding, **axes)


def model_of(words: str) -> ModelShape:
    """Return the shape of a model: by its name, or from its configuration.

    Args:
        words: a name such as llama-3-8b, a config.json, or a folder that holds one.

    Raises:
        SettingError: no such name, or a file that is no configuration.
    """
    from varlen.cost.shape import ModelShape

    path = Path(words)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        if path.suffix == ".json" or "/" in words:
            raise SettingError(f"--model {words}: there is no configuration at {path}")
        return ModelShape.named(words)
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"--model {words}: {path} can't be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise SettingError(f"--model {words}: {path} is no configuration, which is an object of settings")
    return ModelShape.from_config(config)


def hardware_of(words: str) -> Hardware:
    """Return hardware: by its name, or as `varlen plan --calibrate` measured it.

    Args:
        words: a name such as h100, or a file.

    Raises:
        SettingError: no such name, no such file, or a file of something else.
    """
    from varlen.cost.hardware import Hardware

    if Path(words).is_file():
        from varlen.cost.saved import load_hardware

        return load_hardware(words)
    if Path(words).suffix == ".json":
        raise SettingError(
            f"--hardware {words}: there is no such file; varlen plan --calibrate --save makes one"
        )
    return Hardware.named(words)
