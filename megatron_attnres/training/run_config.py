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
    exit_status_when_stopped: int


@dataclass(frozen=True)
class WatchConfig:
    """What looks after the run.

    Attributes:
        run_dir: the run's folder; heartbeats and failure reports need one.
        heartbeat_seconds: between two signs of life of every rank.
        max_skipped_steps: updates in a row that may be skipped.
        alarm_window: iterations that losses and gradient norms are compared with.
        loss_spike_deviations: standard deviations above their median that make a spike; 0: none.
        grad_norm_alarm_ratio: times their median that make an alarm; 0: none.
        straggler_interval: iterations per report of slow ranks; 0: none.
        straggler_ratio: times the fastest rank of the stage that make a rank slow.
        peak_tflops: 10^12 operations a second that one accelerator can do, for MFU.
        wandb_project, wandb_exp_name, wandb_mode: of Weights & Biases; no project, no run there.
    """

    run_dir: str | None
    heartbeat_seconds: float
    max_skipped_steps: int
    alarm_window: int
    loss_spike_deviations: float
    grad_norm_alarm_ratio: float
    straggler_interval: int
    straggler_ratio: float
    peak_tflops: float | None
    wandb_project: str | None
    wandb_exp_name: str | None
    wandb_mode: str


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
    watch: WatchConfig
    nproc_per_node: int | None
    backend: str | None
    timeout_minutes: float

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one iteration on each data-parallel rank."""
        return self.loop.global_batch_size // (self.loop.micro_batch_size * self.layout.data)
