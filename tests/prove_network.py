"""Step time of the pipeline policies over a slow network: every rank behind a limited link.

python tests/prove_network.py --virtual 2 1 --rates 100 25

Needs root: see tests/namespaces.py. Every rank computes at the same fixed speed. Every round runs
one training step of each policy in turn; timed is the pipeline step alone, from a barrier until
the last rank has ended it. Further rounds are profiled: from their compute times and the link's
rate the simulator predicts the step.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import distributed

from megatron_attnres.model.configuration import AttnResConfig, ModelConfig
from megatron_attnres.optimizer.build import build_optimizer
from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.optimizer.main_gradients import main_gradient
from megatron_attnres.optimizer.training_optimizer import TrainingOptimizer
from megatron_attnres.parallel.cpu import device
from megatron_attnres.parallel.gradients import finish_gradients
from megatron_attnres.parallel.groups import ParallelGroups, initialize_groups
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.pipeline.profiler.profiler import PipelineProfiler
from megatron_attnres.pipeline.schedule import ScheduleConfig
from megatron_attnres.pipeline.step import PipelineStep
from megatron_attnres.pipeline.timeline.records import Timelines
from megatron_attnres.pipeline.wire import Traffic
from megatron_attnres.training.build import build_step
from megatron_attnres.training.forward_step import forward_step
from megatron_attnres.training.metrics import mean_loss_of_batch
from tests.distributed import GROUP_TIMEOUT, run_ranks
from tests.layouts import SEED, Case, microbatches, timeline_layout
from tests.namespaces import ThrottledNetwork, throttled_network, why_not
from tests.predict_network import Prediction, exposed_seconds, predicted

REFERENCE = "naive"
BASELINE = "baseline"
POLICIES = {
    BASELINE: {"policy": "naive", "early_relay": False},
    REFERENCE: {"policy": "naive", "early_relay": False},
    "naive, early relay": {"policy": "naive", "early_relay": True},
    "cached": {"policy": "cached", "early_relay": False},
    "cached, early relay": {"policy": "cached", "early_relay": True},
}
# Rounds that are not counted after a change of the rate.
WARM_UP = 1
# Rounds after the counted ones.
PROFILED = 2
BITS = 1_000_000
JOB_TIMEOUT = 3600.0


@dataclass(frozen=True)
class Setup:
    """What is measured: a model on layouts over networks."""

    layers: int
    ranks: int
    block_size: int
    hidden: int
    seq_length: int
    micro_batch_size: int
    microbatches: int
    virtual: tuple[int, ...]
    rates: tuple[float, ...]
    rounds: int
    cores_per_rank: float
    recompute: str

    def case(self, policy: str, virtual: int) -> Case:
        """What one policy runs on one layout."""
        model = ModelConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            ffn_hidden_size=3 * self.hidden,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=self.hidden // 4,
            # The head, which the last chunk alone has, costs little: chunks take about as long.
            vocab_size=128,
            seq_length=self.seq_length,
            tied_embeddings=False,
            attn_res=AttnResConfig("baseline" if policy == BASELINE else "block", self.block_size),
        )
        return replace(
            Case(model, ParallelLayout(1, self.ranks, virtual)),
            num_microbatches=self.microbatches,
            micro_batch_size=self.micro_batch_size,
            recompute=self.recompute,
            **POLICIES[policy],
        )


@dataclass(frozen=True)
class Row:
    """One policy on one layout over one network.

    Attributes:
        rate: of a rank's link each way, Mbit/s.
        seconds: of every counted step.
        seconds_of_reference: of the reference policy's steps of the same rounds.
        p2p_bytes: payload of one step, both directions, all ranks.
        first_loss, last_loss: of all steps at this rate.
        exposed: exposed communication of the average stage, seconds, in profiled steps.
        predicted: by the simulator.
    """

    virtual: int
    rate: float
    policy: str
    seconds: tuple[float, ...]
    seconds_of_reference: tuple[float, ...]
    p2p_bytes: int
    first_loss: float
    last_loss: float
    exposed: float
    predicted: Prediction

    @property
    def median_seconds(self) -> float:
        """The step time."""
        return median(self.seconds)

    @property
    def ratio(self) -> float:
        """To the reference, median over rounds."""
        pairs = zip(self.seconds, self.seconds_of_reference, strict=True)
        return median(own / reference for own, reference in pairs)

    @property
    def predicted_over_measured(self) -> float:
        """Of the step time."""
        return self.predicted.seconds / self.median_seconds


@dataclass(frozen=True)
class Training:
    """One policy's model on this rank."""

    case: Case
    groups: ParallelGroups
    step: PipelineStep
    optimizer: TrainingOptimizer
    profiler: PipelineProfiler


@dataclass(frozen=True)
class Iteration:
    """One training iteration as one rank saw it; the clock is that of all ranks."""

    begin: float
    end: float
    loss: float
    p2p_bytes: int

    @property
    def seconds(self) -> float:
        """Of this rank's step."""
        return self.end - self.begin


@dataclass
class Found:
    """One policy at one rate, as one rank saw it; timelines are on rank 0."""

    iterations: list[Iteration]
    timelines: Timelines | None = None


def measure(setup: Setup) -> list[Row]:
    """Train every policy on every layout over every network."""
    rows = []
    first = round(setup.rates[0] * BITS)
    with throttled_network(setup.ranks, first, setup.cores_per_rank) as network:
        for virtual in setup.virtual:
            by_rank = run_ranks(
                train, setup.ranks, setup, virtual, network, host=network, timeout=JOB_TIMEOUT
            )
            rows += rows_of_layout(virtual, by_rank)
    return rows


def train(setup: Setup, virtual: int, network: ThrottledNetwork) -> dict[float, dict[str, Found]]:
    """Runs on every rank: by rate and policy, every iteration's figures."""
    groups = initialize_groups(ParallelLayout(1, setup.ranks, virtual), GROUP_TIMEOUT)
    trainings = {name: build(setup.case(name, virtual), groups) for name in POLICIES}
    found = {}
    for rate in setup.rates:
        network.set_rate(round(rate * BITS))
        found[rate] = {name: Found([]) for name in trainings}
        for index in range(WARM_UP + setup.rounds):
            for name, training in trainings.items():
                found[rate][name].iterations.append(iterate(training, nullcontext()))
            if distributed.get_rank() == 0:
                steps = [f"{found[rate][name].iterations[-1].seconds:.2f}" for name in trainings]
                where = f"V {virtual}, {rate:g} Mbit/s, round {index - WARM_UP + 1}"
                print(f"{where}: {' '.join(steps)} s", file=sys.stderr, flush=True)
        for name, training in trainings.items():
            found[rate][name].timelines = profile(training)
    return found


def build(case: Case, groups: ParallelGroups) -> Training:
    """A model as training starts it; tests.layouts.build sets depth queries off zero."""
    step = build_step(
        case.model,
        groups,
        case.micro_batch_size,
        torch.float32,
        SEED,
        ScheduleConfig(
            case.layout.pipeline, case.overlap, case.recompute, case.policy, case.early_relay
        ),
    )
    optimizer = build_optimizer(
        step.chunks, OptimizerConfig(lr=1e-3, zero_stage=0), groups.collection
    )
    profiler = PipelineProfiler(step, timeline_layout(case), device(), GROUP_TIMEOUT)
    return Training(case, groups, step, optimizer, profiler)


def profile(training: Training) -> Timelines | None:
    """Some more iterations, recorded; the result is on rank 0."""
    training.profiler.begin()
    for index in range(PROFILED):
        iterate(training, training.profiler.step(index + 1))
    return training.profiler.end()


def iterate(training: Training, watch: AbstractContextManager[None]) -> Iteration:
    """One step, timed, and the update."""
    case, groups, step = training.case, training.groups, training.step
    batches = microbatches(case, groups.data_rank)
    iterators = [iter(batches) for _ in step.chunks]
    distributed.barrier()
    begin = time.monotonic()
    with watch:
        record = step.run(forward_step, iterators, case.num_microbatches)
    end = time.monotonic()
    finish_gradients(step.chunks, groups.collection, main_gradient)
    training.optimizer.step()
    loss = mean_loss_of_batch(record.losses, groups)
    return Iteration(begin, end, loss, bytes_of_all_ranks(record.traffic))


def bytes_of_all_ranks(traffic: Traffic) -> int:
    """Payload of a step, both directions."""
    sent = torch.tensor(traffic.total("forward") + traffic.total("backward"))
    distributed.all_reduce(sent)
    return int(sent.item())


def rows_of_layout(virtual: int, by_rank: Sequence[dict[float, dict[str, Found]]]) -> list[Row]:
    """Rows of what every rank found."""
    rows = []
    for rate, policies in by_rank[0].items():
        seconds = {
            name: tuple(
                max(one.end for one in ranks) - max(one.begin for one in ranks)
                for ranks in zip(*(found[rate][name].iterations for found in by_rank), strict=True)
            )[WARM_UP:]
            for name in policies
        }
        for name, found in policies.items():
            iterations = found.iterations
            rows.append(
                Row(
                    virtual,
                    rate,
                    name,
                    seconds[name],
                    seconds[REFERENCE],
                    iterations[0].p2p_bytes,
                    iterations[0].loss,
                    iterations[-1].loss,
                    exposed_seconds(found.timelines.steps),
                    predicted(found.timelines, rate * BITS / 8),
                )
            )
    return rows


def print_table(rows: Sequence[Row]) -> None:
    """For people."""
    print(
        f"{'V':>2}{'Mbit/s':>8}  {'policy':<22}{'MiB':>7}{'ms':>8}{'ratio':>7}"
        f"{'predicted ms':>14}{'/ measured':>12}{'exposed ms':>12}{'predicted':>11}  loss"
    )
    for row in rows:
        print(
            f"{row.virtual:>2}{row.rate:>8g}  {row.policy:<22}{row.p2p_bytes / 2**20:>7.1f}"
            f"{1e3 * row.median_seconds:>8.0f}{row.ratio:>7.3f}"
            f"{1e3 * row.predicted.seconds:>14.0f}{row.predicted_over_measured:>12.3f}"
            f"{1e3 * row.exposed:>12.0f}{1e3 * row.predicted.exposed:>11.0f}"
            f"  {row.first_loss:.3f} to {row.last_loss:.3f}"
        )


def print_json(rows: Sequence[Row]) -> None:
    """For programs."""
    derived = ("median_seconds", "ratio", "predicted_over_measured")
    print(
        json.dumps([asdict(row) | {name: getattr(row, name) for name in derived} for row in rows])
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=4, help="sublayers")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--virtual", type=int, nargs="+", default=[2, 1], help="chunks per rank")
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 25], help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores-per-rank", type=float, default=0.45)
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="full")
    parser.add_argument("--json", action="store_true")
    arguments = vars(parser.parse_args())
    wanted = print_json if arguments.pop("json") else print_table
    missing = why_not()
    if missing is not None:
        print(f"{parser.prog}: {missing}", file=sys.stderr)
        sys.exit(2)
    lists = {name: tuple(arguments.pop(name)) for name in ("virtual", "rates")}
    wanted(measure(Setup(**arguments, **lists)))


if __name__ == "__main__":
    main()
