"""Everything a gate run measured, raw enough to decide again (``gate --from report.json``) without a GPU."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from .measurements_distributed import DistributedRun
from .measurements_speed import Clocks as Clocks
from .measurements_speed import KernelClass as KernelClass
from .measurements_speed import Quartet as Quartet
from .measurements_speed import StepTime as StepTime
from .record import Record as Record
from .statistics import Estimate

Arm = Literal["baseline", "candidate"]


class SliceQuality(Record):
    """One arm's held-out quality on one task; None where a value does not exist, with the reason in ``note``."""

    #: Mean log loss in nats.
    log_loss: float | None
    #: Log loss over the entropy of the background rate.
    ne: float | None
    auc: float | None
    #: Sum of predictions over sum of labels.
    calibration: float | None
    note: str | None = None
    #: Held-out rows; None in records that do not say.
    rows: int | None = None


class TaskQuality(SliceQuality):
    """As :class:`SliceQuality`, over all held-out rows, with what only they have."""

    #: Mean AUC within groups, weighted by their rows; None where the task names no groups.
    gauc: float | None = None
    #: By the names of the slices that the task marks.
    slices: dict[str, SliceQuality] = Field(default_factory=dict)


class LossSummary(Record):
    """The training loss of one arm and seed."""

    #: Mean over the first and over the last tenth of the steps; None where one of them is not finite.
    first: float | None
    last: float | None
    #: At most 100 points (step, mean loss since the point before; None where not finite).
    curve: tuple[tuple[int, float | None], ...]


class Operand(Record):
    """What quantization did to one operand of one layer, as narrowgate.precision.observer counts it.

    Shares are of all elements, ``underflowed`` of the non-zero ones; ``worst_*`` is the worst observed step's.
    """

    layer: str
    path: str
    operand: str
    #: The format expression.
    format: str
    steps: int
    elements: int
    amax: float
    saturated: float
    worst_saturated: float
    worst_saturated_step: int
    underflowed: float
    worst_underflowed: float
    worst_underflowed_step: int
    #: Beyond a clip's limit on purpose, hence not counted as saturated.
    clipped: float
    worst_clipped: float
    nonfinite: float
    #: dB; None where nothing was lost.
    sqnr_db: float | None


class Stability(Record):
    """What every training step was watched for. Steps count from 1."""

    steps: int
    non_finite_losses: int
    non_finite_gradients: int
    #: The first step with a non-finite loss or gradient. Training stops soon after it.
    first_non_finite: int | None
    #: Steps whose loss exceeds ``spike_factor`` times the median of the window before.
    spikes: int
    first_spike: int | None
    #: Largest finite gradient norm.
    max_gradient_norm: float | None
    #: Largest share in an observed step over all quantized tensors; None where nobody counted.
    saturation: float | None = None
    underflow: float | None = None
    clipped: float | None = None
    #: Steps in which tensors were counted, and why there are none, where there are none.
    observed_steps: int = 0
    not_observed: str | None = None
    #: The operands that saturate, underflow or lose the most, the worst first.
    worst: tuple[Operand, ...] = ()
    #: Parameters whose gradient was absent or all zero in every observed step.
    without_gradient: tuple[str, ...] = ()


class ArmRun(Record):
    """One training of one arm."""

    quality: dict[str, TaskQuality]
    losses: LossSummary
    stability: Stability
    #: Allocator peak of training in bytes; None off the GPU.
    peak_memory: int | None
    seconds: float
    #: Part of ``seconds`` spent before the first step's result: compilation on the first seed.
    first_step_seconds: float
    #: Part of ``seconds`` spent on the held-out rows; None in reports of before minor 2.
    evaluation_seconds: float | None = None
    #: Trained by an earlier run of the same content that did not end, or as another recipe's baseline.
    reused: bool = False


class SeedRun(Record):
    """A pair: both arms from the same initial weights, on the same batches, with the same dropout."""

    seed: int
    baseline: ArmRun
    candidate: ArmRun


class RowEstimate(Record):
    """Ingredients of a row interval: a mean, its cluster-robust standard error (None: infinite) and its degrees."""

    mean: float
    error: float | None
    df: int

    def estimate(self) -> Estimate:
        """Return it as an estimate with bounds."""
        return Estimate(self.mean, math.inf if self.error is None else self.error, self.df)

    @classmethod
    def of(cls, estimate: Estimate) -> RowEstimate:
        """Return ``estimate`` in a form that JSON can carry."""
        finite = math.isfinite(estimate.error)
        return cls(mean=estimate.mean, error=estimate.error if finite else None, df=int(estimate.df))


class SliceRows(Record):
    """Row intervals within one slice, by task."""

    ne: dict[str, RowEstimate] = Field(default_factory=dict)
    auc: dict[str, RowEstimate] = Field(default_factory=dict)


class RowIntervals(Record):
    """How far the differences would move with other held-out rows: per-row differences averaged over seeds."""

    rows: int
    #: Clusters that the rows fall into; equal to ``rows`` where the task names no groups.
    clusters: int
    #: Relative NE increase and AUC loss, by task; a task whose metric does not exist is absent.
    ne: dict[str, RowEstimate]
    auc: dict[str, RowEstimate]
    #: GAUC loss, by task: over groups, each of which is a cluster.
    gauc: dict[str, RowEstimate] = Field(default_factory=dict)
    slices: dict[str, SliceRows] = Field(default_factory=dict)


class FusedTime(Record):
    """The candidate's steps against BF16 on the fused kernels that the candidate casts with; no gate."""

    #: Why there is none; None where there is.
    why: str | None = None
    #: ``baseline_ms`` is the BF16 arm's.
    quartets: tuple[Quartet, ...] = ()
    #: Milliseconds a step that its kernels take to write BF16 where the candidate's write codes.
    write_ms: float | None = None
    seconds: float | None = None


class ModuleProduct(Record):
    """A layer's product in a real step: y [m, n] = x [m, k] times its weight; ``m`` over all rows of one call."""

    name: str
    type: str
    m: int
    k: int
    n: int


class ModuleRegion(Record):
    """The smallest piece of the step that holds a layer and what is fused with it (narrowgate.gates.regions)."""

    #: The layers in it, in the first of its calls.
    products: tuple[ModuleProduct, ...]
    #: What is fused around them: operations and modules by name, in the order in which they run.
    around: tuple[str, ...]
    #: How often a step runs it, under whatever names: the same work on the same shapes in the same formats.
    calls: int
    layers: tuple[str, ...]
    #: Of the FLOPs of all regions that the recipe changes, these calls' part.
    share: float

    @property
    def name(self) -> str:
        """The names of its layers in its first call."""
        return ", ".join(dict.fromkeys(product.name for product in self.products))


class ModuleRun(ModuleRegion):
    """A region that was timed: forward and backward, milliseconds a call."""

    #: ``*_host_ms`` is what the host needs to launch a call, not what the call takes.
    quartets: tuple[Quartet, ...]


class ModuleLeft(ModuleRegion):
    """A region that was not timed, and why."""

    why: str


class ModuleTime(Record):
    """The experiment on modules alone, or why there was none."""

    #: ``no_modules``: the recipe lowers no layer, and changes what travels or the optimizer's state.
    status: Literal["measured", "no_gpu", "emulated", "skipped", "nothing_lowered", "no_modules", "failed"]
    #: Why no region could be found, where that failed.
    why: str | None = None
    #: Heaviest first.
    modules: tuple[ModuleRun, ...] = ()
    left_out: tuple[ModuleLeft, ...] = ()
    seconds: float | None = None
    #: Why clocks are absent, where they are.
    clocks_note: str | None = None

    @property
    def covered(self) -> float:
        """Of the FLOPs of all regions that the recipe changes, the part that was timed."""
        return math.fsum(module.share for module in self.modules)


class PartEffect(Record):
    """Paired differences against the baseline on one task, a value a seed that has one."""

    seeds: int
    ne_increase: tuple[float, ...]
    auc_loss: tuple[float, ...]

    def mean_ne_increase(self) -> float | None:
        """Return the mean relative NE increase; None where a seed has none."""
        whole = self.ne_increase and len(self.ne_increase) == self.seeds
        return math.fsum(self.ne_increase) / self.seeds if whole else None


class PartQuality(Record):
    """What one part of the recipe does to quality: on alone, and with all but it on; by task."""

    kind: Literal["layers", "path"]
    name: str
    #: Quantized layers in it.
    layers: int
    only: dict[str, PartEffect]
    without: dict[str, PartEffect]


class Measurements(Record):
    """All that :func:`narrowgate.gates.decision.decide` looks at."""

    #: Without a task there would be no quality that a gate could reject.
    tasks: tuple[str, ...] = Field(min_length=1)
    seeds: tuple[SeedRun, ...]
    rows: RowIntervals | None
    step_time: StepTime
    #: None in reports of before minor 2, which had no such gate.
    module_time: ModuleTime | None = None
    #: None in reports of before minor 2.
    fused_time: FusedTime | None = None
    device: str
    #: Why paths of the recipe are emulated on this device; empty where all are native.
    emulated: tuple[str, ...] = ()
    #: Numbers of seeds at which a look was declared ahead; training stopped at one of them. Empty: one look.
    looks: tuple[int, ...] = ()
    #: Where quality is lost, where that was asked for.
    parts: tuple[PartQuality, ...] = ()
    #: Of a run on several ranks; ``step_time`` is then one rank's own, without the others. Since minor 3.
    distributed: DistributedRun | None = None

    @property
    def deciding_step(self) -> StepTime:
        """The step that is judged: of all ranks together, where there are several."""
        return self.step_time if self.distributed is None else self.distributed.step

    @model_validator(mode="after")
    def _stopped_at_a_look(self) -> Measurements:
        if list(self.looks) != sorted(set(self.looks)):
            raise ValueError(f"looks: found {list(self.looks)}, expected increasing numbers of seeds")
        if self.looks and len(self.seeds) not in self.looks:
            raise ValueError(f"{len(self.seeds)} seeds were measured, and looks were declared at {list(self.looks)}")
        return self
