"""One run, as plain data: everything that flags, files and the launcher decide. No torch."""

from dataclasses import dataclass

from megatron_attnres.data.configuration import DataConfig, TokenizerConfig
from megatron_attnres.model.configuration import ModelConfig
from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.pipeline.schedule import ScheduleConfig
from megatron_attnres.training.checkpoints.configuration import SaveConfig


@dataclass(frozen=True)
class LoopConfig:
    """What the loop does and where it writes; intervals in iterations, None for never."""

    train_iters: int
    micro_batch_size: int
    global_batch_size: int
    seed: int
    eval_interval: int | None
    eval_iters: int
    log_interval: int
    metrics_file: str | None
    tensorboard_dir: str | None
    summary_file: str | None
    save: str | None
    save_interval: int | None
    load: str | None
    load_weights_only: bool
    save_on_signal: bool
    exit_duration_minutes: float | None


@dataclass(frozen=True)
class ProfileConfig:
    """Iterations whose pipeline steps are recorded.

    Attributes:
        first, last: both included.
        folder: where timelines, trace and pictures go.
    """

    first: int
    last: int
    folder: str


@dataclass(frozen=True)
class RunConfig:
    """A whole run.

    Attributes:
        save: how to save; None without ``--save``.
        profile: what to record; None without ``--profile-pipeline``.
        nproc_per_node: ranks that this command starts itself; None under a launcher.
        backend: of torch.distributed; None picks by device.
        timeout_minutes: of every process group.
    """

    model: ModelConfig
    layout: ParallelLayout
    schedule: ScheduleConfig
    optimizer: OptimizerConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    loop: LoopConfig
    save: SaveConfig | None
    profile: ProfileConfig | None
    nproc_per_node: int | None
    backend: str | None
    timeout_minutes: float

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one iteration on each data-parallel rank."""
        return self.loop.global_batch_size // (self.loop.micro_batch_size * self.layout.data)
