"""The inspector: what it counts is the model's, and two layouts of one state are equal to it."""

import json
import runpy
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from megatron_attnres.depth_attention.module import DepthAttention
from megatron_attnres.errors import InputError
from megatron_attnres.optimizer.parameter_groups import parameter_groups, unique_named_parameters
from megatron_attnres.training.checkpoints.comparison import bits_equal, compare, difference_of
from megatron_attnres.training.checkpoints.configuration import SaveConfig
from megatron_attnres.training.checkpoints.description import Description, TrainingState
from megatron_attnres.training.checkpoints.folders import digest_of, folder_of, publish
from megatron_attnres.training.checkpoints.inspection import summarise
from megatron_attnres.training.checkpoints.plans import Piece, PieceSavePlanner
from megatron_attnres.training.checkpoints.saving import CheckpointSaver
from megatron_attnres.training.checkpoints.stored_checkpoint import StoredCheckpoint
from tests.training.checkpoints.test_layouts import BEFORE, LAYOUTS, MODEL, Run, on
from tests.training.command import ROOT, Finished
from tests.training.command import run as run_command

ONE, INTERLEAVED = LAYOUTS["one"], LAYOUTS["interleaved"]
MORE = 2
STATE = TrainingState(BEFORE, 8 * BEFORE, 64 * BEFORE)
DESCRIPTION = Description(
    state=STATE,
    optimizer_steps=BEFORE,
    scheduler={},
    model={"num_layers": MODEL.num_layers, "hidden_size": MODEL.hidden_size},
    data={"seed": 1234},
    order="of samples",
    tokenizer={},
    configuration={"layout": {}, "optimizer": {"zero_stage": 1, "precision": "fp32"}},
    plan_digest="one",
)
KINDS = {"master", "exp_avg", "exp_avg_sq"}


def inspect(*arguments: object) -> Finished:
    command = (sys.executable, "tools/inspect_checkpoint.py")
    return run_command([str(one) for one in arguments], command=command)


def inspect_here(*arguments: object) -> None:
    """In this process, which has torch already."""
    main = runpy.run_path(str(ROOT / "tools" / "inspect_checkpoint.py"))["main"]
    main([str(one) for one in arguments])


def save(run: Run, folder: Path, iteration: int, plan_digest: str = "one") -> None:
    """As a real run does, with a description that says how it was laid out."""
    description = replace(
        DESCRIPTION,
        state=replace(STATE, iteration=iteration),
        optimizer_steps=run.optimizer.steps,
        configuration=DESCRIPTION.configuration | {"layout": asdict(run.case.layout)},
        plan_digest=plan_digest,
    )
    saver = CheckpointSaver(SaveConfig(str(folder), asynchronous=False, retries=0), run.pieces)
    saver.start(description)
    saver.finish()


def train_and_save(folder):
    """A state and a later one; the numbers of parameters that the model itself has, by group."""
    run = Run(ONE, 1, "fp32")
    run.train(range(BEFORE))
    save(run, folder, BEFORE)
    run.train(range(BEFORE, BEFORE + MORE))
    save(run, folder, BEFORE + MORE)
    named = unique_named_parameters(run.step.chunks)
    readers = [
        module
        for chunk in run.step.chunks
        for module in chunk.modules()
        if isinstance(module, DepthAttention)
    ]
    groups = [group["params"] for group in parameter_groups(named, 0.1)]
    groups.append([parameter for reader in readers for parameter in reader.parameters()])
    return [sum(one.numel() for one in group) for group in groups]


def load_and_save(folder, again):
    """The same state, written by other ranks in other boxes."""
    run = Run(INTERLEAVED, 1, "fp32")
    run.load(folder)
    save(run, again, BEFORE, plan_digest="other")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of one rank's run, the same state from four ranks, and the model's counts."""
    one, other = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    [counts] = on(ONE, (train_and_save, one))
    on(INTERLEAVED, (load_and_save, folder_of(one, BEFORE), other))
    return one, other, counts


@pytest.fixture(scope="module")
def inspected(saved):
    """The JSON of the checkpoint that four ranks wrote, found through ``latest``."""
    answer = inspect(saved[1], "--verify", "--json")
    assert answer.status == 0, answer.stderr
    return json.loads(answer.stdout)


def test_it_counts_the_models_parameters(saved, inspected):
    decayed, not_decayed, depth = saved[2]
    assert depth > 0
    assert inspected["parameters"] == {
        "total": decayed + not_decayed,
        "weight_decayed": decayed,
        "not_decayed": not_decayed,
        "depth_attention": depth,
    }
    assert inspected["bytes_by_kind"] == dict.fromkeys(KINDS, 4 * (decayed + not_decayed))


def test_json_says_everything_about_the_run_and_the_files(saved, inspected):
    folder = folder_of(saved[1], BEFORE)
    assert inspected["folder"] == str(folder)
    position = ("iteration", "consumed_samples", "tokens", "optimizer_steps")
    assert [inspected[name] for name in position] == [3, 24, 192, 3]
    assert inspected["layout"] == {
        "tensor": 1,
        "pipeline": 2,
        "virtual_pipeline": 2,
        "data": 2,
        "zero_stage": 1,
        "precision": "fp32",
        "sequence_parallel": False,
        "layers_per_chunk": None,
    }
    assert inspected["plan_digest"] == "other"
    assert inspected["model"] == DESCRIPTION.model
    assert inspected["data"] == DESCRIPTION.data | {"order": DESCRIPTION.order}
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert {file["name"]: file["bytes"] for file in inspected["files"]} == sizes
    assert inspected["total_bytes"] == sum(sizes.values())
    assert inspected["verified"] is True
    assert inspected["diff"] is None


def test_every_tensor_has_its_shape_and_boxes(saved, inspected):
    tensors = {tensor["name"]: tensor for tensor in inspected["tensors"]}
    assert {name.partition(".")[0] for name in tensors} == KINDS
    [embedding] = [name for name in tensors if name.startswith("master.embedding")]
    assert tensors[embedding]["shape"] == [MODEL.vocab_size, MODEL.hidden_size]
    assert tensors[embedding]["dtype"] == "float32"
    by_one_rank = StoredCheckpoint(folder_of(saved[0], BEFORE)).tensors
    assert by_one_rank.keys() == tensors.keys()
    assert by_one_rank[embedding].boxes == 1
    # Replicas share the writing, so that some tensors are cut where their shares meet.
    assert all(tensors[name]["boxes"] >= one.boxes for name, one in by_one_rank.items())
    assert any(tensors[name]["boxes"] > one.boxes for name, one in by_one_rank.items())


def test_people_are_told_the_same(saved, inspected, capsys):
    inspect_here(saved[1], "--tensors", "--verify")
    text = capsys.readouterr().out
    assert "TP 1, P 2, V 2, DP 2, ZeRO stage 1, fp32\n" in text
    assert f"{inspected['parameters']['total']:,}\n" in text
    assert "whole" in text
    assert all(tensor["name"] in text for tensor in inspected["tensors"])
    assert all(file["name"] in text for file in inspected["files"])


def test_a_flipped_byte_is_found_and_its_file_named(saved, tmp_path):
    folder = tmp_path / "iter_0000003"
    shutil.copytree(folder_of(saved[1], BEFORE), folder)
    victim = sorted(folder.glob("*.distcp"))[1]
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    answer = inspect(folder, "--verify")
    assert (answer.status, answer.stdout) == (2, "")
    assert len(answer.stderr.splitlines()) == 1
    assert str(victim) in answer.stderr
    assert "damaged" in answer.stderr


def test_one_state_in_two_layouts_is_equal(saved):
    one, other = folder_of(saved[0], BEFORE), saved[1]
    answer = inspect(one, "--diff", other, "--json")
    assert answer.status == 0, answer.stderr
    diff = json.loads(answer.stdout)["diff"]
    assert diff["equal"] is True
    assert diff["bit_equal"] == len(StoredCheckpoint(one).tensors)
    assert diff["different"] == diff["only_in_one"] == diff["only_in_other"] == []
    assert {field["name"]: (field["one"], field["other"]) for field in diff["fields"]} == {
        "layout.pipeline": (1, 2),
        "layout.virtual_pipeline": (1, 2),
        "layout.data": (1, 2),
        "layout.plan_digest": ("one", "other"),
    }


def test_a_later_state_differs_and_its_tensors_are_named(saved):
    later = folder_of(saved[0], BEFORE + MORE)
    answer = inspect(saved[1], "--diff", later)
    assert answer.status == 1, answer.stderr
    lines = answer.stdout.splitlines()
    assert "state.iteration: 3 in one, 5 in the other" in lines
    assert "state.optimizer_steps: 3 in one, 5 in the other" in lines
    assert lines[-1] == "different"
    first = next(index for index, line in enumerate(lines) if "worst first" in line) + 1
    shown = [line.split() for line in lines[first : first + 20]]
    comparison = compare(StoredCheckpoint(folder_of(saved[1], BEFORE)), StoredCheckpoint(later))
    assert [name for *_, name in shown] == [one.name for one in comparison.different[:20]]
    assert f"and {len(comparison.different) - 20} more; --json has all" in lines
    norms = [one.relative_norm for one in comparison.different]
    assert norms == sorted(norms, reverse=True)
    assert comparison.bit_equal + len(norms) == len(StoredCheckpoint(later).tensors)


def write(save_folder, tensors, description=DESCRIPTION):
    """A checkpoint of any tensors, by one process."""
    final = folder_of(save_folder, description.state.iteration)
    writing = final.with_name(final.name + ".writing")
    writing.mkdir(parents=True)
    pieces = [Piece(name, tuple(one.shape), (0,) * one.ndim, one) for name, one in tensors.items()]
    planner, writer = PieceSavePlanner(pieces), FileSystemWriter(writing)
    planner.set_up_planner({}, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    [plan] = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    description.write(writing)
    publish(writing, final, {path.name: digest_of(path) for path in writing.iterdir()})
    return StoredCheckpoint(final)


def test_missing_and_reshaped_tensors_and_other_models_are_told(tmp_path):
    model = {"num_layers": 4, "tied_embeddings": True}
    wider = replace(DESCRIPTION, model=model, order="another")
    one = write(tmp_path / "a", {"master.a": torch.ones(2), "master.b": torch.ones(2, 3)})
    other = write(tmp_path / "b", {"master.b": torch.ones(3, 2), "master.c": torch.ones(1)}, wider)
    found = compare(one, other)
    assert not found.equal
    assert (found.only_in_one, found.only_in_other) == (["master.a"], ["master.c"])
    [pair] = found.of_other_shape
    assert (pair.name, pair.one, pair.other) == ("master.b", (2, 3), (3, 2))
    assert {field.name: (field.one, field.other) for field in found.fields} == {
        "model.hidden_size": (16, None),
        "model.tied_embeddings": (None, True),
        "data.order": ("of samples", "another"),
    }
    assert (found.bit_equal, found.different) == (0, [])


def test_the_worst_difference_comes_first_and_no_number_is_worse_than_any(tmp_path):
    values = {name: torch.arange(1.0, 5.0) for name in ("same", "little", "much", "broken")}
    changed = {name: value.clone() for name, value in values.items()}
    changed["little"][0] += 1e-3
    changed["much"] *= -1
    changed["broken"][2] = torch.nan
    found = compare(write(tmp_path / "a", values), write(tmp_path / "b", changed))
    assert found.bit_equal == 1
    assert [one.name for one in found.different] == ["broken", "much", "little"]
    broken, much, little = found.different
    assert (broken.largest, broken.relative_norm) == (None, None)
    assert (much.largest, much.relative_norm) == pytest.approx((8, 2))
    assert little.largest == pytest.approx(1e-3, rel=1e-3)
    assert little.relative_norm == pytest.approx(1e-3 / 30**0.5, rel=1e-3)


def test_bits_are_compared_not_values():
    nan, zero = torch.tensor([torch.nan]), torch.zeros(())
    assert bits_equal(nan, nan.clone())
    assert bits_equal(zero, zero.clone())
    assert not bits_equal(zero, -zero)
    assert not bits_equal(zero, zero.double())
    assert difference_of(zero, -zero) == (0, 0)
    empty = torch.zeros(0, 3)
    assert bits_equal(empty, empty.clone())


@pytest.mark.parametrize("elements", [1, 2, 3, 7, 8])
def test_slices_make_no_difference(elements, monkeypatch):
    monkeypatch.setattr("megatron_attnres.training.checkpoints.comparison._SLICE", elements)
    one, other = torch.arange(8.0).view(2, 4), torch.arange(8.0).view(2, 4)
    assert bits_equal(one, other)
    other[1, 3] = 9
    assert not bits_equal(one, other)
    norm = torch.linalg.vector_norm(other).item()
    assert difference_of(one, other) == pytest.approx((2, 2 / norm))


def test_what_a_description_does_not_say_is_unknown(tmp_path, capsys):
    silent = replace(DESCRIPTION, configuration={}, model={}, data={})
    checkpoint = write(tmp_path, {"master.a.weight": torch.ones(2, 3)}, silent)
    assert set(summarise(checkpoint).layout.values()) == {None}
    inspect_here(tmp_path)
    assert "TP ?, P ?, V ?, DP ?, ZeRO stage ?, ?\n" in capsys.readouterr().out


def test_a_tensor_that_cannot_be_read_is_one_line(tmp_path):
    checkpoint = write(tmp_path, {"master.a": torch.ones(1000)})
    [file] = checkpoint.folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(InputError, match=r"master\.a cannot be read") as caught:
        compare(checkpoint, checkpoint)
    assert "\n" not in str(caught.value)
    file.unlink()
    with pytest.raises(InputError, match="No such file"):
        checkpoint.read("master.a")


@pytest.mark.parametrize("name", ["run.json", ".metadata", "checksums.json"])
def test_a_damaged_description_is_one_line(name, tmp_path):
    folder = write(tmp_path, {"master.a": torch.ones(3)}).folder
    (folder / name).write_bytes((folder / name).read_bytes()[:-5])
    with pytest.raises(InputError, match="damaged") as caught:
        StoredCheckpoint(folder)
    assert str(folder / name) in str(caught.value)


def test_sums_do_not_make_a_pickle_readable(tmp_path):
    folder = write(tmp_path, {"master.a": torch.ones(3)}).folder
    (folder / ".metadata").write_bytes(b"no pickle\n")
    names = [path for path in folder.iterdir() if path.name != "checksums.json"]
    publish_again = tmp_path / "again"
    shutil.copytree(folder, publish_again)
    publish(publish_again, folder, {path.name: digest_of(path) for path in names})
    with pytest.raises(InputError, match=r"it cannot be read \(UnpicklingError") as caught:
        StoredCheckpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prepare", "arguments", "words"),
    [
        (None, [], ["CHECKPOINT", "--help"]),
        (None, ["{}/nowhere"], ["{}/nowhere", "no such folder"]),
        (None, ["{}"], ["{}", "no file latest"]),
        ("iter_0000009", ["{}"], ["{}", "names 'iter_0000009'"]),
        (None, ["{}", "--shapes"], ["--shapes"]),
    ],
)
def test_bad_input_is_one_line(prepare, arguments, words, tmp_path):
    if prepare is not None:
        (tmp_path / "latest").write_text(prepare)
    answer = inspect(*(one.format(tmp_path) for one in arguments))
    assert (answer.status, answer.stdout) == (2, "")
    assert len(answer.stderr.splitlines()) == 1
    assert all(word.format(tmp_path) in answer.stderr for word in words), answer.stderr


def test_a_bad_checkpoint_to_compare_with_is_named(saved, tmp_path, capsys):
    shutil.copytree(folder_of(saved[0], BEFORE), tmp_path / "iter_0000003")
    (tmp_path / "iter_0000003" / "run.json").write_text("{")
    with pytest.raises(InputError, match="damaged") as caught:
        inspect_here(saved[0], "--diff", tmp_path / "iter_0000003")
    assert str(tmp_path / "iter_0000003" / "run.json") in str(caught.value)
    assert capsys.readouterr().out == ""
