"""Runs side by side, for people and for programs."""

import json
from datetime import timedelta

from megatron_attnres.evaluation.comparison.results import RunResult, as_object
from megatron_attnres.evaluation.comparison.settings import CorpusRequest, EvaluationSettings
from megatron_attnres.evaluation.comparison.table import comparison_table
from megatron_attnres.evaluation.flags import JobFlags
from megatron_attnres.evaluation.perplexity.perplexity import Perplexity
from megatron_attnres.evaluation.tasks.harness import TaskFigure
from megatron_attnres.parallel.layout import ParallelLayout
from tests.layouts import small_model

SETTINGS = EvaluationSettings(
    JobFlags(ParallelLayout(), None, None, timedelta(minutes=1)),
    None,
    CorpusRequest(text=("novel.txt",)),
    None,
    8,
    None,
    4,
)


def result(run, mode="block", nats=20.0, stderr=0.05):
    return RunResult(
        run=run,
        checkpoint=f"{run}/checkpoints/iter_0000010",
        model=small_model(mode=mode),
        iteration=10,
        trained_tokens=12_345,
        precision="fp32",
        context=8,
        stride=8,
        perplexity=Perplexity(1, 10, 4, 30, nats),
        tasks=[
            TaskFigure("hellaswag", "acc", "none", 0.25, stderr, True, 6, 2, 1.0),
            TaskFigure("gsm8k", "exact_match", "strict", 12345.6, None, True, 4, 0, 1.0),
        ],
        positions=100,
        seconds=4.0,
    )


def test_one_column_a_run_and_one_row_a_figure():
    runs = [result("runs/a", "baseline"), result("runs/b", nats=30.0, stderr=None)]
    title, empty, *lines = comparison_table(runs, "novel.txt", markdown=False).splitlines()
    assert (title, empty) == ("perplexity of novel.txt", "")
    assert lines[0].split() == ["a", "(baseline)", "b", "(block)"]
    assert len({len(line) for line in lines}) == 1
    longest = "gsm8k exact_match, strict, 4 documents"
    rows = {line[: len(longest)].strip(): line[len(longest) :].split() for line in lines[1:]}
    assert rows["trained on tokens"] == ["12,345", "12,345"]
    assert rows["nats per token"] == ["2.0000", "3.0000"]
    assert rows["tokens per second"] == ["25", "25"]
    assert rows["hellaswag acc, 2-shot, 6 documents"] == ["0.2500", "±", "0.0500", "0.2500"]
    assert rows[longest] == ["12,346", "12,346"]


def test_runs_of_one_name_are_told_apart_by_their_paths():
    runs = [result("old/run"), result("new/run")]
    first = comparison_table(runs, None, markdown=False).splitlines()[0]
    assert first.split() == ["old/run", "(block)", "new/run", "(block)"]


def test_markdown_is_a_table():
    header, rule, *rows = comparison_table([result("a|b")], None, markdown=True).splitlines()
    assert header == "|  | a\\|b (block) |"
    assert rule == "| --- | ---: |"
    assert "| hellaswag acc, 2-shot, 6 documents | 0.2500 ± 0.0500 |" in rows


def test_json_has_everything_and_no_number_that_json_lacks():
    found = as_object([result("runs/a", nats=float("nan"))], SETTINGS)
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again == found
    assert found["layout"]["pipeline"] == 1
    assert found["settings"]["corpus"]["text"] == ["novel.txt"]
    assert found["versions"]["torch"]
    (run,) = found["runs"]
    assert run["mode"] == "block"
    assert run["model"]["attn_res"]["block_size"] == 4
    assert run["perplexity"]["nats_per_token"] is None
    assert run["tasks"][0]["stderr"] == 0.05
    assert (run["seconds"], run["tokens_per_second"]) == (4.0, 25.0)
