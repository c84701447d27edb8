"""A checkpoint of any layout continues in any other, to the last bit of its state."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from megatron_attnres.optimizer.build import build_optimizer
from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.optimizer.main_gradients import main_gradient
from megatron_attnres.parallel.gradients import finish_gradients
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.checkpoints.configuration import SaveConfig
from megatron_attnres.training.checkpoints.description import Description, TrainingState
from megatron_attnres.training.checkpoints.loading import find_checkpoint, load_training
from megatron_attnres.training.checkpoints.pieces import StatePieces
from megatron_attnres.training.checkpoints.saving import CheckpointSaver
from megatron_attnres.training.forward_step import forward_step
from megatron_attnres.training.metrics import mean_loss_of_batch
from tests.distributed import restart_job, run_ranks
from tests.layouts import Case, build, microbatches, small_model

MODEL = small_model(4, block_size=3)
BATCH = 8
LAYOUTS = {
    "one": ParallelLayout(),
    "interleaved": ParallelLayout(1, 2, 2, 2),
    "tensor": ParallelLayout(2, 2, 1, 1, True),
    "deep": ParallelLayout(1, 4),
}
BEFORE, AFTER = 3, 10


def case_of(layout: ParallelLayout) -> Case:
    return Case(MODEL, layout, BATCH // (2 * layout.data))


class Run:
    """A run on one layout whose every step is given by its number."""

    def __init__(self, layout: ParallelLayout, zero_stage: int, precision: str) -> None:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self.case = case_of(layout)
        self.groups, self.step = build(self.case, dtype)
        config = OptimizerConfig(lr=1e-3, precision=precision, zero_stage=zero_stage)
        self.optimizer = build_optimizer(self.step.chunks, config, self.groups.collection)
        self.pieces = StatePieces(self.step.chunks, self.optimizer, self.groups)

    def train(self, steps: range) -> list[float]:
        losses = []
        for seed in steps:
            batches = microbatches(self.case, self.groups.data_rank, seed)
            iterators = [iter(batches) for _ in self.step.chunks]
            record = self.step.run(forward_step, iterators, self.case.num_microbatches)
            finish_gradients(self.step.chunks, self.groups.collection, main_gradient)
            self.optimizer.step()
            losses.append(mean_loss_of_batch(record.losses, self.groups))
        return losses

    def save(self, folder: Path, iteration: int, asynchronous: bool = False) -> None:
        saver = CheckpointSaver(SaveConfig(str(folder), asynchronous, retries=0), self.pieces)
        state = TrainingState(iteration)
        saver.start(Description(state, self.optimizer.steps, {}, {}, {}, "", {}, {}, ""))
        saver.finish()

    def load(self, folder: Path, weights_only: bool = False) -> None:
        found = find_checkpoint(str(folder), None)
        steps = 0 if weights_only else Description.read(found).optimizer_steps
        load_training(found, self.pieces, self.optimizer, steps, weights_only)

    def state(self) -> dict[str, Tensor]:
        """Every whole tensor, put together from what all ranks would write."""
        own = [
            (piece.name, piece.whole_shape, piece.offsets, piece.tensor.clone())
            for piece in self.pieces.to_write()
        ]
        everyone = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, own)
        whole: dict[str, Tensor] = {}
        for name, shape, offsets, tensor in (one for part in everyone for one in part):
            target = whole.setdefault(name, torch.full(shape, torch.nan))
            sizes = zip(offsets, tensor.shape, strict=True)
            target[tuple(slice(o, o + s) for o, s in sizes)] = tensor
        return whole


def run_and_save(layout, zero_stage, precision, folder, asynchronous):
    """Losses before, the state saved, losses after without a stop."""
    run = Run(layout, zero_stage, precision)
    before = run.train(range(BEFORE))
    run.save(folder, BEFORE, asynchronous)
    state = run.state()
    return before, state, run.train(range(BEFORE, BEFORE + AFTER))


def load_and_run(layout, zero_stage, precision, folder, again):
    """The state loaded and its losses; the state is saved ``again`` before."""
    run = Run(layout, zero_stage, precision)
    run.load(folder)
    state = run.state()
    run.save(again, BEFORE)
    return state, run.optimizer.steps, run.train(range(BEFORE, BEFORE + AFTER))


def load(layout, folder):
    """The state loaded."""
    run = Run(layout, 1, "fp32")
    run.load(folder)
    return run.state()


def job(jobs):
    """Runs on every rank; several runs in one launch."""
    results = []
    for function, *arguments in jobs:
        results.append(function(*arguments))
        restart_job()
    return results


def on(layout, *jobs, **options):
    """Rank 0's results."""
    return run_ranks(job, layout.world_size, list(jobs), **options)[0]


def same(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By layout: the folder, the state, and the losses of the run that went on."""
    found = {}
    for name, layout in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name)
        asynchronous = name == "interleaved"
        [(_, state, after)] = on(layout, (run_and_save, layout, 1, "fp32", folder, asynchronous))
        found[name] = folder, state, after
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_of_any_layout_goes_on_in_this_one(name, saved, tmp_path):
    """From each: state equal bit for bit, there and back, and the losses of one that went on."""
    layout = LAYOUTS[name]
    jobs = [
        (load_and_run, layout, 1, "fp32", folder, tmp_path / source)
        for source, (folder, _, _) in saved.items()
    ]
    results = on(layout, *jobs)
    for (source, (_, state, after)), (loaded, steps, losses) in zip(
        saved.items(), results, strict=True
    ):
        assert not any(tensor.isnan().any() for tensor in loaded.values())
        assert same(loaded, state) == [], source
        assert steps == BEFORE
        assert losses == pytest.approx(after, rel=1e-5), source
        if source == name:
            assert losses == after, "to the last bit in the same layout"
    for source, (_, state, _) in saved.items():
        [loaded] = on(LAYOUTS[source], (load, LAYOUTS[source], tmp_path / source))
        assert same(loaded, state) == [], (name, source)


def test_the_zero_stage_and_the_precision_may_change(saved, tmp_path):
    layout = LAYOUTS["interleaved"]
    folder, state, after = saved["deep"]
    replicated, narrow = on(
        layout,
        (load_and_run, layout, 0, "fp32", folder, tmp_path / "replicated"),
        (load_and_run, layout, 1, "bf16", folder, tmp_path / "narrow"),
    )
    for loaded, _, _ in (replicated, narrow):
        assert same(loaded, state) == []
    assert replicated[2] == pytest.approx(after, rel=1e-5)
    assert narrow[2] == pytest.approx(after, rel=0.02)
    assert narrow[2] != after
    [(loaded, _, losses)] = on(
        LAYOUTS["one"],
        (load_and_run, LAYOUTS["one"], 1, "fp32", tmp_path / "narrow", tmp_path / "x"),
    )
    assert same(loaded, state) == []
    assert losses == pytest.approx(after, rel=1e-5)


def load_weights(layout, folder):
    run = Run(layout, 1, "fp32")
    run.load(folder, weights_only=True)
    return run.state(), run.optimizer.steps


def test_weights_alone(saved):
    folder, state, _ = saved["interleaved"]
    [(loaded, steps)] = on(LAYOUTS["deep"], (load_weights, LAYOUTS["deep"], folder))
    assert steps == 0
    for name, tensor in loaded.items():
        kind = name.split(".")[0]
        assert torch.equal(tensor, state[name] if kind == "master" else torch.zeros_like(tensor))


def test_a_description_survives_its_file(tmp_path):
    written = Description(
        TrainingState(3, 6, 9), 2, {"num_steps": 3}, {"a": [1]}, {}, "o", {}, {}, "d"
    )
    written.write(tmp_path)
    assert asdict(Description.read(tmp_path)) == asdict(written)
    assert Description.read(tmp_path) == replace(written)
