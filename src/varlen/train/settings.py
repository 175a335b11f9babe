"""What a run trains, on what, how and for how long: frozen nouns, one a table of the configuration file."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, Union

from varlen.arguments import MEMORY_FRACTION, TOKENS, Declared, options_of
from varlen.documents.source import Unit, Until
from varlen.errors import SettingError
from varlen.feed.settings import LoaderSettings
from varlen.step_plan import PlanMethod

Tokens: TypeAlias = Annotated[int, TOKENS]
"""A number of tokens: a whole number, or in a file also a text such as "4k", which is 4,096."""
MAX_SEED = 2**32 - 1
"""Every generator takes seeds up to here."""
TAKEN = {
    ".running",
    "checkpoints",
    "evaluations.jsonl",
    "hardware.json",
    "model",
    "plans.json",
    "samples.jsonl",
    "tensorboard",
    "trackers.json",
    "wandb",
}
"""Names in the output folder beside that of the metrics; `claim.py` says what each holds."""
_OF_RUN = {"dp_rank", "dp_world_size", "epochs", "device", "model", "plan"}
"""Arguments of `vl.PackedLoader` that a run decides."""
_REQUIRED = {"capacity", "global_batch_size"}


def _in_file(option: Declared) -> Any:
    """Return the type of a loader argument in a file; None means the loader's own default."""
    return Union[(*(one for one in option.types if one is not Path), None)]


_OfLoader: Any = make_dataclass(
    "_OfLoader",
    [
        (name, _in_file(one), None)
        for name, one in options_of(LoaderSettings).items()
        if name not in _OF_RUN | _REQUIRED
    ],
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True, kw_only=True)
class DataSettings(_OfLoader):  # type: ignore[misc]
    """`[data]`: the arguments of `vl.PackedLoader`; those left out have the loader's own defaults.

    `seed` left out is that of the run.
    """

    source: str | tuple[str, ...] = ()
    """A token store of `varlen index`; or files, folders, globs or URLs of documents."""
    mixture: Mapping[str, Any] = field(default_factory=dict)
    """In place of `source`, several by names of yours: `[data.mixture.NAME]` with a `source` as above and a
    `weight`."""
    unit: Unit = "tokens"
    """Whether the weights of a mixture are shares of tokens or of documents."""
    until: Until | None = None
    """A mixture ends where the "first" source does, where "all" have been read, or never ("endless"); left out:
    "first", or "endless" where `run.steps` alone decides."""
    capacity: Tokens
    """Of a pack."""
    global_batch_size: int
    """Packs of an optimizer step, over all processes."""
    tokenizer: str | None = None
    """Left out: that of `model.path`, else bytes. With a token store: the one that made it."""

    def __post_init__(self) -> None:
        if bool(self.source) == bool(self.mixture):
            both = (
                "names both a source and a mixture" if self.source else "names neither a source nor a mixture"
            )
            raise SettingError(
                f"[data] {both}; give source, or a table [data.mixture.NAME] for each of several"
            )
        for name, part in self.mixture.items():
            where = f"data.mixture.{name}"
            if not isinstance(part, Mapping):
                raise SettingError(f"{where} must be a table with a source and a weight, got {shown(part)}")
            for key in part:
                if key not in ("source", "weight"):
                    raise SettingError(
                        f"{where}.{key} is no setting; a source of a mixture has source and weight"
                    )
            source, weight = part.get("source"), part.get("weight", 1)
            if not (isinstance(source, str) or _is_texts(source)) or not source:
                raise SettingError(
                    f"{where}.source must be a text in quotes or a list of texts, got {shown(source)}"
                )
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise SettingError(f"{where}.weight must be a number above 0, got {shown(weight)}")

    @property
    def named(self) -> str:
        """The source or the mixture's sources, for messages."""
        if self.mixture:
            return ", ".join(f"{name} ({part['source']})" for name, part in self.mixture.items())
        return self.source if isinstance(self.source, str) else ", ".join(self.source)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """`[model]`: random weights of a type and settings, or the weights of a folder."""

    type: str | None = None
    """transformers' name of the architecture, such as "llama"."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """`[model.settings]`: transformers' settings of that architecture; without `vocab_size`, the data's."""
    path: str | None = None
    """A folder that transformers saved a model in, or a name on the hub; documents become its tokenizer's tokens."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the trained model is saved in; "auto": the dtype of the model in `path`, float32 for random weights."""
    attention: str = "auto"
    """"auto": per document where the model allows; or transformers' name of an attention."""

    def __post_init__(self) -> None:
        if (self.type is None) == (self.path is None):
            both = "names both" if self.type is not None else "names neither"
            raise SettingError(
                f"[model] {both}; give type (and [model.settings]) for random weights, or path for a folder of a "
                "saved model or a name on the hub"
            )
        if self.path is not None and self.settings:
            raise SettingError(
                f"model.settings are for random weights, and model.path names {self.path}, which has settings of "
                "its own; leave one of them out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """`[optimizer]`: the optimizer, its learning rate over the steps, and clipping."""

    name: Literal["adamw", "adamw_8bit", "muon", "adafactor"] = "adamw"
    """"adamw_8bit" holds AdamW's state in 8 bits (needs torchao); "muon" updates the matrices of layers by Muon, and
    all else by AdamW; "adafactor" holds one row and one column of state for each matrix."""
    learning_rate: float = 3e-4
    """The highest; of "muon" as of "adamw", since its updates are scaled to the size of AdamW's."""
    beta1: float = 0.9
    """Of AdamW."""
    beta2: float = 0.95
    """Of AdamW."""
    epsilon: float = 1e-8
    """Of AdamW."""
    momentum: float = 0.95
    """Of Muon."""
    weight_decay: float = 0.1
    """Of matrices; norms and biases don't decay."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """How the rate falls after its warm-up; "wsd": not at all, and linearly at the end (`decay_share`)."""
    warmup_steps: int = 0
    """Steps over which the rate rises to its highest."""
    warmup_share: float = 0.0
    """The same as a share of all steps."""
    decay_share: float = 0.2
    """Share of all steps over which "wsd" falls."""
    min_learning_rate: float = 0.0
    """What "cosine", "linear" and "wsd" fall to at the last step."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay", "warmup_steps", "min_learning_rate", "max_grad_norm"):
            _check_range(f"optimizer.{name}", getattr(self, name), 0)
        for name in ("beta1", "beta2", "momentum"):
            _check_range(f"optimizer.{name}", getattr(self, name), 0, 1)
            if getattr(self, name) == 1:
                raise SettingError(f"optimizer.{name} must be below 1: with 1 nothing new ever counts")
        for name in ("warmup_share", "decay_share"):
            _check_range(f"optimizer.{name}", getattr(self, name), 0, 1)
        if self.warmup_steps and self.warmup_share:
            raise SettingError(
                f"optimizer.warmup_steps = {self.warmup_steps:,} and optimizer.warmup_share = {self.warmup_share:g} "
                "both set the warm-up; leave one of them out"
            )
        _check_range("optimizer.epsilon", self.epsilon, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """`[run]`: length, output, device, and how the run resumes after a stop."""

    output: str = "run"
    """The folder of checkpoints, metrics and the trained model."""
    steps: int | None = None
    """Optimizer steps; left out: to the end of the epochs."""
    epochs: int | None = None
    """Passes over all documents; left out: 1, or as many as `steps` need."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last step and Ctrl-C save too. 0: only those."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    save_in_background: bool = False
    """Write checkpoints from a copy in host memory while training goes on."""
    resume: Literal["auto", "never"] = "auto"
    """"auto" resumes from the newest checkpoint in `output`; "never" refuses to run if there is one."""
    seed: int = 0
    """Seed of weights, dropout and, unless `data.seed` is set, the data."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of computation; weights and AdamW's state are float32 in both."""
    parallel: Literal["none", "ddp", "fsdp"] = "ddp"
    """How the processes of `torchrun` share the work; one process needs none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    checkpoint_activations: bool = False
    """Whether each layer keeps only its input, and is computed again in the backward pass: a third more time, and far
    less memory. Of slices, `plan.recompute` decides."""
    compile: bool = False
    """Whether layers are compiled (torch.compile), once for all packs; it needs `data.layout` "rows"."""
    cross_entropy: Literal["auto", "torch", "liger", "cut"] = "auto"
    """What computes the loss of whole packs: "liger" (liger-kernel) and "cut" (cut-cross-entropy) never hold all
    logits; "auto": on a GPU the first of the two that is installed and fits the model, else PyTorch."""
    threads: int | None = None
    """CPU threads per process; runs are bitwise equal only with the same number."""
    timeout_s: float = 600.0
    """Maximum time that processes wait for each other."""

    def __post_init__(self) -> None:
        lowest = {"steps": 1, "epochs": 1, "checkpoint_every": 0, "keep": 1, "threads": 1, "timeout_s": 1}
        for name, limit in lowest.items():
            if getattr(self, name) is not None:
                _check_range(f"run.{name}", getattr(self, name), limit)
        _check_range("run.seed", self.seed, 0, MAX_SEED)

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.output)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSettings:
    """`[log]`: what is logged of every step."""

    metrics: str = "metrics.jsonl"
    """File in the output folder with one line per step."""
    every: int = 10
    """Steps between two printed lines, if the output isn't a terminal."""
    peak_tflops: float | None = None
    """Of a device, to which MFU refers; left out: the manufacturer's figure for dense bf16 of a known GPU."""

    def __post_init__(self) -> None:
        _check_range("log.every", self.every, 1)
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise SettingError(f"log.peak_tflops must be above 0, got {self.peak_tflops:g}")
        if not self.metrics or Path(self.metrics).name != self.metrics or self.metrics in TAKEN:
            raise SettingError(
                "log.metrics is the name of a file in run.output, and none of "
                f"{', '.join(sorted(TAKEN))}; got {self.metrics!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSettings:
    """`[measure]`: what is measured after the last step, so that training isn't disturbed."""

    exposed_data: bool = False
    """Train the last steps again from memory; the extra time of the real steps is that spent on data."""
    steps: int = 20
    """Number of last steps that are trained again."""

    def __post_init__(self) -> None:
        _check_range("measure.steps", self.steps, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """`[plan]`: run steps in slices, by plans made in advance; may be empty. Without it, whole packs are trained.

    One process runs slices of `slice_tokens` unless a method or hardware is set. Several processes are a mesh of `pp`
    stages, `cp` processes that share every document, `tp` processes that share every layer, and as many data-parallel
    ranks as remain; `run.parallel` sets how ranks share a stage. A plan determines the MicroPacks of a step, so
    `data.micro_batch_size` has no effect.
    """

    method: PlanMethod | None = None
    """A method of `vl.plan_step`; left out: "micropack", or slices of `slice_tokens` for one process."""
    slice_tokens: Tokens | None = None
    """Maximum tokens that one process runs at once, without hardware; left out: 8,192."""
    pp: int = 1
    """Pipeline stages; must divide the number of processes."""
    cp: int = 1
    """Processes that share every document of a stage; `pp * cp * tp` must divide the number of processes."""
    tp: int = 1
    """Processes that share every layer of a stage, and must divide its heads (needs transformers 5.23)."""
    virtual_stages: int = 1
    """Chunks of layers per stage."""
    hardware: str = "auto"
    """A name of `vl.Hardware.named`, or a file of `varlen plan --calibrate`; "auto": a calibration of this
    machine at the start of a new run, saved in `run.output`."""
    calibrate_s: float = 20.0
    """Duration of this calibration."""
    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations that are computed again in the backward pass; "auto": as few as memory and speed require; for
    slices of `slice_tokens` it means "full"."""
    offload: Literal["auto", "none", "kv"] = "auto"
    """"kv": keys, values and their gradients of all but two layers in host memory; "auto": only if a step doesn't fit
    otherwise; for slices of `slice_tokens` it means "none"."""
    merges: bool = True
    """Whether data-parallel ranks share documents if that is faster, or necessary for memory."""
    memory_fraction: float = MEMORY_FRACTION
    """Fraction of a GPU's memory that plans may use. Slices of `slice_tokens` don't depend on it, and a dry run
    refuses those that need more."""
    least_rows: Tokens = 2048
    """Rows that a slice of a document has at least: attention kernels are slow on fewer."""
    quick: PlanMethod = "sliced"
    """Method of the answer where a plan isn't there in time. By the same as `method` it is the same plan, so that
    runs are equal to the bit however long plans take; "sliced" takes least."""
    ahead: int = 2
    """Steps that are planned ahead."""
    deadline_s: float = 300.0
    """How long a run waits for its first plan, and for one that is made again after a stop."""

    def __post_init__(self) -> None:
        for name in ("slice_tokens", "pp", "cp", "tp", "virtual_stages", "least_rows", "ahead"):
            if getattr(self, name) is not None:
                _check_range(f"plan.{name}", getattr(self, name), 1)
        for name, highest in (("calibrate_s", None), ("deadline_s", None), ("memory_fraction", 1)):
            if not getattr(self, name) > 0:
                raise SettingError(f"plan.{name} must be above 0, got {getattr(self, name):,}")
            _check_range(f"plan.{name}", getattr(self, name), 0, highest)
        if self.slice_tokens is not None and not self.is_even:
            raise SettingError(
                f"plan.slice_tokens = {self.slice_tokens:,} cuts steps without a cost model, and "
                f"{self._priced_by} needs one; leave one of them out"
            )
        if not self.merges and "dynamic_cp" in (self.method, self.quick):
            name = "method" if self.method == "dynamic_cp" else "quick"
            raise SettingError(
                f'plan.{name} = "dynamic_cp" shares documents among ranks, and plan.merges = false forbids it; set '
                '"balanced" for whole documents, or leave plan.merges out'
            )

    @property
    def is_even(self) -> bool:
        """Whether nothing here needs a cost model, so that one process may run slices of `slice_tokens`."""
        return not self._priced_by

    @property
    def _priced_by(self) -> str:
        """The setting that needs a cost model; "" for none."""
        if self.method not in (None, "sliced"):
            return f'plan.method = "{self.method}"'
        if self.hardware != "auto":
            return f'plan.hardware = "{self.hardware}"'
        above = [
            f"plan.{name} = {getattr(self, name)}" for name in ("pp", "cp", "tp") if getattr(self, name) > 1
        ]
        return above[0] if above else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """`[eval]`: losses on documents that aren't trained, in between and at the end.

    They are read as those of `[data]`: by the same tokenizer, columns and template, in packs of the same capacity.
    """

    sets: Mapping[str, Any]
    """`[eval.sets]`: sources by a name of yours, each as `data.source` is."""
    every: int = 500
    """Steps between evaluations; the last step has one too. 0: only that."""
    at_start: bool = False
    """Whether a new run evaluates before its first step."""
    tokens: Tokens | None = None
    """Of each set, about, from its beginning; left out: all."""
    lengths: tuple[int, ...] = (512, 2048, 8192, 32768)
    """The loss is also given by length of documents: up to and including the first of these tokens, the second, and
    so on, and above the last."""
    monitor: str | None = None
    """The set whose loss decides what is best; left out: all targets of all sets."""
    keep_best: bool = False
    """Keep the checkpoint of the lowest loss beside the newest ones, and export its weights as the trained model."""
    patience: int | None = None
    """Early stopping: end the run after so many evaluations in a row without a lower loss; left out: never."""
    least_gain: float = 0.0
    """Of `patience`: a loss counts as lower only if it is so by more than this."""

    def __post_init__(self) -> None:
        _check_range("eval.every", self.every, 0)
        _check_range("eval.least_gain", self.least_gain, 0)
        for name in ("tokens", "patience"):
            if getattr(self, name) is not None:
                _check_range(f"eval.{name}", getattr(self, name), 1)
        if not self.sets:
            raise SettingError('[eval.sets] names no set; give it one, such as valid = "valid.jsonl"')
        for name, source in self.sets.items():
            if not (isinstance(source, str) or _is_texts(source)) or not source:
                raise SettingError(
                    f"eval.sets.{name} must be a text in quotes or a list of texts, got {shown(source)}"
                )
        if self.monitor is not None and self.monitor not in self.sets:
            near = difflib.get_close_matches(self.monitor, list(self.sets), n=1, cutoff=0.0)[0]
            raise SettingError(
                f"eval.monitor is {self.monitor!r}, which is no set of [eval.sets]; the nearest is {near!r}"
            )
        if list(self.lengths) != sorted({length for length in self.lengths if length > 0}):
            raise SettingError(f"eval.lengths must rise and be above 0, got {shown(list(self.lengths))}")

    def source_of(self, name: str) -> str | tuple[str, ...]:
        """Return the source of a set, as `DataSettings.source`."""
        source = self.sets[name]
        return source if isinstance(source, str) else tuple(source)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSettings:
    """`[adapter]`: train a low-rank adapter of the model alone (needs peft); may be empty."""

    method: Literal["lora", "dora"] = "lora"
    """"dora" also learns the magnitude of each row."""
    rank: int = 16
    """Of the two matrices that are learned for each layer."""
    alpha: float = 32.0
    """Their product is added to the layer's weights `alpha / rank` times."""
    dropout: float = 0.0
    """Of the adapter's inputs."""
    targets: tuple[str, ...] = ()
    """Names of layers that get an adapter, such as "q_proj"; left out: all linear layers but the output head."""
    export: Literal["adapter", "merged"] = "adapter"
    """What is exported: the adapter as peft saves it, or the whole model with the adapter in its weights."""

    def __post_init__(self) -> None:
        _check_range("adapter.rank", self.rank, 1)
        _check_range("adapter.dropout", self.dropout, 0, 1)
        if not self.alpha > 0:
            raise SettingError(f"adapter.alpha must be above 0, got {self.alpha:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSettings:
    """`[sample]`: texts that the model writes after prompts, to look at while it is trained.

    It needs `prompts`, `chats`, or both.
    """

    prompts: tuple[str, ...] = ()
    """What texts begin with, as they stand: nothing is put around them."""
    chats: tuple[str, ...] = ()
    """What a user says to a model trained on chats: the chat template is put around it, and the model answers."""
    every: int = 500
    """Steps between texts; the last step has some too. 0: only that."""
    tokens: int = 64
    """Of a text, at most."""
    temperature: float = 0.0
    """0: always the likeliest token."""

    def __post_init__(self) -> None:
        _check_range("sample.every", self.every, 0)
        _check_range("sample.tokens", self.tokens, 1)
        _check_range("sample.temperature", self.temperature, 0)
        if not all((*self.prompts, *self.chats)) or not (self.prompts or self.chats):
            raise SettingError(
                "sample.prompts or sample.chats must hold texts, and no empty one; or leave [sample] out"
            )


Tracking = Literal["tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackSettings:
    """`[track]`: trackers that record metrics and evaluations, beside the files in `run.output`.

    Where and how they send is set as for the library itself, such as by WANDB_MODE or MLFLOW_TRACKING_URI.
    """

    to: tuple[Tracking, ...] = ()
    """The trackers; each must be installed. TensorBoard writes into `run.output`."""
    project: str = "varlen"
    """The project of Weights & Biases, and the experiment of MLflow."""
    name: str | None = None
    """The name of the run; left out: the tracker's choice."""


def shown(value: Any) -> str:
    """Return a value for messages."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """The whole configuration: a field a table."""

    data: DataSettings
    model: ModelSettings
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    run: RunSettings = field(default_factory=RunSettings)
    log: LogSettings = field(default_factory=LogSettings)
    measure: MeasureSettings = field(default_factory=MeasureSettings)
    plan: PlanSettings | None = None
    eval: EvalSettings | None = None
    track: TrackSettings | None = None
    adapter: AdapterSettings | None = None
    sample: SampleSettings | None = None

    def __post_init__(self) -> None:
        if self.plan is not None and self.model.attention != "auto":
            raise SettingError(
                f'model.attention = "{self.model.attention}" and [plan]: slices bring their own attention; leave one '
                "of them out"
            )
        divided = [] if self.plan is None else [n for n in ("pp", "cp", "tp") if getattr(self.plan, n) > 1]
        if divided and self.sample is not None:
            raise SettingError(
                f"[sample] needs a whole model on each process, and plan.{divided[0]} divides it; leave one of them "
                "out"
            )
        if self.run.compile and self.plan is not None:
            raise SettingError(
                "run.compile is for whole packs, which all have one shape, and [plan] runs slices of many; leave one "
                "of them out"
            )
        if self.run.compile and self.data.layout == "flat":
            raise SettingError(
                'run.compile needs packs of one shape, and data.layout = "flat" has many; set data.layout = "rows"'
            )
        if self.plan is not None and self.run.cross_entropy != "auto":
            raise SettingError(
                f'run.cross_entropy = "{self.run.cross_entropy}" is for whole packs, and [plan] runs slices, whose '
                "losses are computed in blocks; leave one of them out"
            )
        if self.plan is not None and self.run.checkpoint_activations:
            raise SettingError(
                "run.checkpoint_activations is for whole packs, and [plan] runs slices; leave it out: plan.recompute "
                "decides what is computed again"
            )


def _check_range(name: str, value: float, lowest: float, highest: float | None = None) -> None:
    """Require that a number lies in its range, both ends included."""
    if not value >= lowest:
        raise SettingError(f"{name} must be at least {lowest:,}, got {value:,}")
    if highest is not None and not value <= highest:
        raise SettingError(f"{name} must be at most {highest:,}, got {value:,}")
