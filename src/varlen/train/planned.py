"""What a run with `[plan]` is built of: its mesh, its cost model, and the engine that runs its plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.distributed.device_mesh import init_device_mesh

from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape, check_mesh
from varlen.counts import many
from varlen.errors import SettingError
from varlen.feed.loader import PackedLoader
from varlen.runtime.engine import SliceEngine
from varlen.runtime.ranks import seat_of
from varlen.runtime.stage import cut_to_stage
from varlen.step_plan import Mesh, Sharding
from varlen.train.parallel import sharded
from varlen.train.plans import EvenSlices, Plans, PlansAhead
from varlen.train.ranks import Ranks
from varlen.train.rates import AUTOCAST, WIDE, hardware_of, with_wide_rows
from varlen.train.settings import PlanSettings, RunSettings, TrainSettings

_SHARDING: Final[dict[str, Sharding]] = {"none": "none", "ddp": "none", "fsdp": "parameters"}


def mesh_of(plan: PlanSettings, run: RunSettings, world_size: int) -> Mesh:
    """Return how the processes of a run are arranged.

    Args:
        plan: its stages.
        run: how data-parallel ranks share a stage.
        world_size: processes.

    Raises:
        SettingError: they can't be divided into pipelines, or each needs hardware that there is no word of.
    """
    if world_size % plan.pp:
        below, above = world_size - world_size % plan.pp, world_size + plan.pp - world_size % plan.pp
        near = f"{below:,} or {above:,}" if below else f"{above:,}"
        raise SettingError(
            f"plan.pp = {plan.pp} stages, and there {'is' if world_size == 1 else 'are'} "
            f"{many(world_size, 'process', 'processes')}; start {near}, or set a plan.pp "
            f"that divides {world_size:,}"
        )
    if plan.slice_tokens is not None and world_size > 1:
        raise SettingError(
            f"plan.slice_tokens is for one process, and there are {world_size:,}; leave it out: several run slices "
            "of equal seconds"
        )
    dp = world_size // plan.pp
    sharding = _SHARDING[run.parallel] if dp > 1 else "none"
    return Mesh(dp=dp, pp=plan.pp, virtual_stages=plan.virtual_stages, sharding=sharding)


def plans_of(
    loader: PackedLoader,
    settings: TrainSettings,
    config: Any,
    ranks: Ranks,
    say: Callable[[str], object],
) -> Plans:
    """Return what plans the steps of a run; nothing is planned yet, but a new machine is measured.

    Args:
        loader: of the run, with all packs of a step in one batch.
        settings: of the run, with a `plan`.
        config: of the model.
        ranks: of the run.
        say: told what goes on.

    Raises:
        SettingError: a mesh that doesn't divide the processes or the model, hardware that isn't there, or data whose
            lengths nobody knows.
    """
    plan = settings.plan
    assert plan is not None, "such a run is planned"
    mesh = mesh_of(plan, settings.run, ranks.world_size)
    if loader.mode == "streaming":
        raise SettingError(
            "[plan] needs the lengths of coming steps, which streaming reads first; index the documents (varlen "
            'index) and name the store as data.source, or set data.mode = "indexed"'
        )
    if plan.is_even and ranks.world_size == 1:
        return EvenSlices(plan)
    shape = ModelShape.from_config(config)
    check_mesh(shape, mesh)
    cost = _cost_of(settings, plan, shape, mesh, ranks, say) if ranks.is_first else None
    return PlansAhead(loader, plan, mesh=mesh, cost=cost, ranks=ranks, folder=settings.run.folder)


def _cost_of(
    settings: TrainSettings,
    plan: PlanSettings,
    shape: ModelShape,
    mesh: Mesh,
    ranks: Ranks,
    say: Callable[[str], object],
) -> CostModel:
    """What plans are priced by."""
    hardware = hardware_of(
        plan,
        shape,
        device=ranks.device,
        dtype=torch.bfloat16 if settings.run.precision == "bf16" else torch.float32,
        folder=settings.run.folder,
        say=say,
    )
    # The engine gathers what ranks share before it attends to it: nothing of that is hidden.
    cost = CostModel(
        model=shape,
        hardware=hardware,
        kernels="eager",
        memory_fraction=plan.memory_fraction,
        exchange_overlap=0.0,
    )
    run = settings.run
    is_autocast = run.precision == "bf16" and run.parallel != "fsdp"
    return with_wide_rows(cost, mesh, AUTOCAST if is_autocast else WIDE if run.precision == "fp32" else 1.0)


def engine_of(model: Any, settings: TrainSettings, ranks: Ranks) -> SliceEngine:
    """Cut a model to this process's stage, shard it if that is wanted, and return what runs plans through it.

    Args:
        model: equal on every rank, on the CPU; cut in place.
        settings: of the run, with a `plan`.
        ranks: of the run.

    Raises:
        ModelError: a family that isn't run in slices, or one that isn't cut.
        VarlenError: another rank has another model, or is gone.
    """
    plan, run = settings.plan, settings.run
    assert plan is not None, "such a run is planned"
    mesh = mesh_of(plan, run, ranks.world_size)
    is_sharded = run.parallel == "fsdp" and (mesh.dp > 1 or run.precision == "bf16")
    if mesh.num_gpus == 1 and not is_sharded:
        return SliceEngine(model.to(ranks.device))
    cut_to_stage(model, mesh, seat_of(mesh, ranks.rank).stage)
    if is_sharded:
        replicas = init_device_mesh(ranks.device.type, (mesh.pp, mesh.dp), mesh_dim_names=("pp", "dp"))["dp"]
        sharded(model, run, ranks.device, replicas)
    else:
        model.to(ranks.device)
    return SliceEngine(model, mesh=mesh, rank=ranks.rank, deadline_s=run.timeout_s)
