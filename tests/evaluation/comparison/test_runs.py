"""A job of several ranks evaluates runs as one process does, and ends together."""

from dataclasses import replace
from datetime import timedelta

import pytest
from torch import distributed

from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.comparison.runs import evaluate_with
from megatron_attnres.evaluation.comparison.settings import CorpusRequest, EvaluationSettings
from megatron_attnres.evaluation.flags import JobFlags
from megatron_attnres.parallel.groups import initialize_groups
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.checkpoints.stored_model import find_stored_model
from tests.distributed import GROUP_TIMEOUT, restart_job, run_ranks
from tests.evaluation.checkpoints import make_checkpoint
from tests.evaluation.text import WIKITEXT, generating_task, make_tokenizer
from tests.layouts import small_model

CONTEXT = 64
ONE, SHARDED = ParallelLayout(), ParallelLayout(2, sequence_parallel=True)
STAGES = ParallelLayout(1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = make_tokenizer(folder)
    for mode in ("block", "full"):
        model = replace(small_model(mode=mode, seq_length=CONTEXT), vocab_size=512)
        make_checkpoint(folder / mode, model, tokenizer)
    return folder


def settings_for(layout, corpus=None, tasks=None):
    job = JobFlags(layout, None, None, timedelta(minutes=1))
    return EvaluationSettings(job, None, corpus, tasks, None, None, 4)


def outcome(folder, settings):
    """Results on rank 0, None on the others, or the error."""
    groups = initialize_groups(settings.job.layout, GROUP_TIMEOUT)
    runs = [find_stored_model(str(folder / mode)) for mode in ("block", "full")]
    try:
        return evaluate_with(groups, runs, settings)
    except InputError as error:
        return str(error)
    finally:
        restart_job()


def outcomes(folder, tasks, empty):
    """Of one rank, or of what two ranks are for."""
    pages = CorpusRequest(text=(str(WIKITEXT),), json_key="page", max_documents=2)
    if distributed.get_world_size() == 1:
        return [outcome(folder, settings_for(ONE, pages, tasks))]
    return [
        outcome(folder, settings_for(SHARDED, pages, tasks)),
        outcome(folder, settings_for(STAGES, pages, tasks)),
        outcome(folder, settings_for(STAGES, CorpusRequest(text=(str(empty),)))),
    ]


def test_ranks_answer_and_end_together(folder, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    records = [{"question": text, "answer": "e"} for text in ("def main(", "import", "the")]
    tasks = generating_task(tmp_path, records)
    ((one,),) = run_ranks(outcomes, 1, folder, tasks, empty)
    first, second = run_ranks(outcomes, 2, folder, tasks, empty)

    for whole, sharded in zip(one, first[0], strict=True):
        assert sharded.tasks == whole.tasks
        assert sharded.perplexity.nats == pytest.approx(whole.perplexity.nats, rel=1e-6)
        assert sharded.positions == whole.positions
    assert second[0] is None
    assert [run.mode for run in one] == ["block", "full"]

    for messages in (first[1:], second[1:]):
        assert "give --pipeline-model-parallel-size 1" in messages[0]
        assert messages[1].startswith("--text")
