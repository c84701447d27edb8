"""Trained models on any layout, led by rank 0."""

from datetime import timedelta

import pytest
import torch
from torch import distributed

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.errors import InputError, LostRankError
from megatron_attnres.evaluation.flags import JobFlags
from megatron_attnres.evaluation.job import Helpers, build_trained, joined
from megatron_attnres.parallel.groups import initialize_groups
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.checkpoints.description import DESCRIPTION
from megatron_attnres.training.checkpoints.folders import newest
from megatron_attnres.training.checkpoints.stored_model import find_stored_model
from tests.distributed import GROUP_TIMEOUT, restart_job, run_ranks
from tests.evaluation.checkpoints import make_checkpoint, shapes_of
from tests.layouts import full_parameters, small_model

NULL = TokenizerConfig("NullTokenizer", vocab_size=60)
LAYOUTS = [
    ParallelLayout(2, 2),
    ParallelLayout(1, 2, 2, 2),
    ParallelLayout(2, 1, 1, 2, True),
    ParallelLayout(),
]


def weights_on(folder, layout):
    groups = initialize_groups(layout, GROUP_TIMEOUT)
    step = build_trained(find_stored_model(str(folder)), groups, "fp32")
    return full_parameters(groups, step)


def weights_on_every_layout(folder):
    found = []
    for layout in LAYOUTS:
        if layout.world_size == distributed.get_world_size():
            restart_job()
            found.append(weights_on(folder, layout))
    return found


def test_every_layout_holds_the_same_weights(tmp_path):
    model = small_model(num_layers=4, tied=False, recency_bias=0.5)
    make_checkpoint(tmp_path, model)
    (one,) = run_ranks(weights_on_every_layout, 1, tmp_path)[0]
    assert {name: tuple(tensor.shape) for name, tensor in one.items()} == shapes_of(model)
    for other in run_ranks(weights_on_every_layout, 4, tmp_path)[0]:
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_one_process_needs_no_launcher(tmp_path):
    make_checkpoint(tmp_path, small_model())
    job = JobFlags(ParallelLayout(), None, None, timedelta(minutes=1))
    with joined(job) as groups:
        step = build_trained(find_stored_model(str(tmp_path)), groups)
        assert step.chunks[0].module.is_last
    assert not distributed.is_initialized()


def test_a_reader_of_the_output_that_has_enough_is_no_lost_rank():
    job = JobFlags(ParallelLayout(), None, None, timedelta(minutes=1))
    with pytest.raises(BrokenPipeError), joined(job):
        raise BrokenPipeError(32, "Broken pipe")
    assert not distributed.is_initialized()


def asked_for_sums():
    def answer(request):
        total = torch.tensor(float(request))
        distributed.all_reduce(total)
        return total.item()

    helpers = Helpers(answer)
    results = helpers.led(lambda ask: [ask(1.0), ask(2.5)])
    try:
        helpers.led(lambda ask: 1 / 0)
    except ZeroDivisionError:
        return results, "rank 0 failed"
    return results, "helped"


def test_rank_0_leads_and_the_others_end_when_it_fails():
    first, *others = run_ranks(asked_for_sums, 3)
    assert first == ([3.0, 7.5], "rank 0 failed")
    assert others == [(None, "helped")] * 2


def test_an_interrupt_stays_one_where_the_others_are_gone():
    with joined(JobFlags(ParallelLayout(), None, None, timedelta(minutes=1))):
        helpers = Helpers(lambda request: None)

        def lead(ask):
            # Nobody can be told any more.
            distributed.destroy_process_group(helpers._group)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            helpers.led(lead)


def refusal_of(folder, layout):
    groups = initialize_groups(layout, GROUP_TIMEOUT)
    try:
        build_trained(find_stored_model(str(folder)), groups)
    except InputError as error:
        return str(error)
    return None


def test_a_layout_that_does_not_fit_is_named(tmp_path):
    make_checkpoint(tmp_path, small_model(num_layers=3))
    for message in run_ranks(refusal_of, 2, tmp_path, ParallelLayout(1, 2)):
        assert f"--load {tmp_path}" in message
        assert "--num-layers 3" in message


def test_a_tokenizer_that_is_not_the_models_is_named(tmp_path):
    make_checkpoint(tmp_path, small_model(), NULL)
    stored = find_stored_model(str(tmp_path))
    assert stored.open_tokenizer().eod == 60
    with pytest.raises(InputError, match="vocab_size 51 instead of 61"):
        stored.open_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=50))


def test_a_model_without_a_known_tokenizer_takes_one_that_fits(tmp_path):
    make_checkpoint(tmp_path, small_model())
    stored = find_stored_model(str(tmp_path))
    with pytest.raises(InputError, match="give --tokenizer-model"):
        stored.open_tokenizer()
    assert stored.open_tokenizer(NULL).eod == 60
    with pytest.raises(InputError, match="has 101 ids"):
        stored.open_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=100))


@pytest.mark.parametrize("content", [None, "empty"])
def test_a_folder_without_a_checkpoint_is_named(tmp_path, content):
    folder = tmp_path / "run"
    if content:
        folder.mkdir()
    with pytest.raises(InputError, match=f"--load {folder}: "):
        find_stored_model(str(folder))


def test_a_description_that_was_edited_is_not_believed(tmp_path):
    folder = newest(str(make_checkpoint(tmp_path, small_model(num_layers=3))))
    path = folder / DESCRIPTION
    path.write_text(path.read_text().replace('"num_layers": 3', '"num_layers": "x"'))
    with pytest.raises(InputError, match=f"--load {tmp_path}: {path} is damaged") as caught:
        find_stored_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_errors_of_other_ranks_are_one_line():
    job = JobFlags(ParallelLayout(), None, None, timedelta(minutes=1))
    with (
        pytest.raises(LostRankError, match=r"rank 0: another rank is gone.*by peer") as caught,
        joined(job),
    ):
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer\nGLHF")
    assert "\n" not in str(caught.value)
    with pytest.raises(RuntimeError, match="its own"), joined(job):
        raise RuntimeError("its own")
