"""What an axolotl configuration says to varlen, and which of axolotl's own settings contradict it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from varlen.adapters.hf.trainer_checks import Weighting
from varlen.arguments import as_tokens
from varlen.errors import SettingError
from varlen.types import Method, Overlong

_CONTRADICT = {
    "sample_packing": "axolotl would pack too",
    "batch_flattening": "axolotl would flatten batches too",
    "rl": "preference and rollout trainers have batches of their own",
    "reward_model": "reward models have batches of their own",
    "process_reward_model": "reward models have batches of their own",
    "pretraining_dataset": "axolotl streams it without lengths; list it under `datasets`",
    "streaming": "axolotl streams without lengths; leave it out",
    "trainer_cls": "the plugin has a trainer class of its own",
}
"""Settings that must be off, and why."""


def _as_capacity(given: Any) -> int | None:
    return None if given is None else as_tokens(given, "varlen.capacity")


class VarlenSettings(BaseModel):
    """The mapping `varlen:` of a configuration; what isn't said here, axolotl's own settings say."""

    model_config = ConfigDict(extra="forbid")

    capacity: Annotated[int | None, BeforeValidator(_as_capacity)] = None
    """Tokens of a pack, such as 8192 or 8k; None for `sequence_len`."""
    global_batch_size: int | None = None
    """Packs of a step; None for `micro_batch_size` on every rank, `gradient_accumulation_steps` times. Say it where a
    run is to go on with another number of ranks."""
    attention: Literal["model", "varlen"] = "model"
    """The attention that the model is set to, or varlen's own, which computes each document by itself."""
    loss_weighting: Weighting = "token"
    """As `PackedTraining` takes it."""
    overlong: Overlong = "split"
    """What becomes of documents longer than a pack, where `capacity` is less than `sequence_len`."""
    method: Method = "best_fit"
    window: int | None = None
    scope: Literal["window", "all"] = "window"
    max_documents: int | None = None
    layout: Literal["rows", "flat"] = "rows"
    worker: Literal["process", "thread"] = "process"
    """As `PackedLoader` takes these."""


class VarlenArguments(BaseModel):
    """What the plugin adds to axolotl's own settings."""

    varlen: VarlenSettings = Field(default_factory=VarlenSettings)

    @model_validator(mode="before")
    @classmethod
    def refuse_other_packers(cls, given: Any) -> Any:
        """Refuse settings under which axolotl makes batches too."""
        wrong = [name for name in _CONTRADICT if given.get(name)]
        if (given.get("context_parallel_size") or 1) > 1:
            raise SettingError(
                f"context_parallel_size={given['context_parallel_size']} cuts rows without regard to documents; "
                "leave it out"
            )
        if wrong:
            told = "; ".join(f"`{name}` ({_CONTRADICT[name]})" for name in wrong)
            raise SettingError(f"varlen packs this run, so leave out {told}")
        return given
