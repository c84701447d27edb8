"""Tasks of the harness: their names, their documents from files, and what is refused."""

import os
import re

import pytest

from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.tasks import harness_tasks as module
from megatron_attnres.evaluation.tasks.harness_tasks import load_tasks
from megatron_attnres.evaluation.tasks.request import TaskRequest, task_data, task_names
from tests.evaluation.text import HELLASWAG, LAMBADA, WIKITEXT, generating_task, records_of


def refusal(call, *arguments):
    with pytest.raises(InputError) as error:
        call(*arguments)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_names_are_separated_by_commas_and_have_aliases():
    assert task_names("wikitext2, lambada,hellaswag,wikitext") == (
        "wikitext",
        "lambada_openai",
        "hellaswag",
    )
    assert "names no task" in refusal(task_names, " ,")


def test_data_is_named_by_task_or_alias():
    names = task_names("wikitext,lambada")
    found = task_data([f"wikitext2={WIKITEXT}", f"lambada={LAMBADA}"], names)
    assert found == {"wikitext": WIKITEXT, "lambada_openai": LAMBADA}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("wikitext", "give NAME=FILE.jsonl"),
        ("wikitext=", "give NAME=FILE.jsonl"),
        ("hellaswag=x.jsonl", "hellaswag is not asked for; --tasks has wikitext"),
        ("wikitext=gone.jsonl", "No such file"),
    ],
)
def test_data_of_another_form_is_refused(given, complaint):
    message = refusal(task_data, [given], ("wikitext",))
    assert message.startswith(f"--task-data {given}: ")
    assert complaint in message


def test_a_task_has_one_file():
    given = [f"wikitext={WIKITEXT}", f"wikitext2={WIKITEXT}"]
    assert "give one file" in refusal(task_data, given, ("wikitext",))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "holds no document"),
        (b"\n \n", "holds no document"),
        (b'{"page": "a"}\n{"page": \n', "line 2 is not JSON"),
        (b'{"page": "a"}\n["b"]\n', "line 2 is no JSON object"),
        (b'{"page": "a"}\n{"pages": "b"}\n', "line 2 has other keys .*(page, pages)"),
        (b'{"page": "\xff"}\n', "not UTF-8"),
    ],
)
def test_lines_that_are_no_documents_are_named(tmp_path, content, complaint):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    message = refusal(task_data, [f"wikitext={path}"], ("wikitext",))
    assert re.search(complaint, message)


def test_documents_come_from_files_in_the_schema_of_the_task():
    request = TaskRequest(("wikitext", "hellaswag"), {"wikitext": WIKITEXT, "hellaswag": HELLASWAG})
    loaded = load_tasks(request)
    assert list(loaded.tasks) == ["wikitext", "hellaswag"]
    assert [doc["page"] for doc in loaded.tasks["wikitext"].eval_docs] == [
        record["page"] for record in records_of(WIKITEXT)
    ]
    labels = [int(record["label"]) for record in records_of(HELLASWAG)]
    assert [doc["gold"] for doc in loaded.tasks["hellaswag"].eval_docs] == labels
    assert loaded.generating() == []


def test_documents_that_do_not_fit_the_task_are_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n')
    message = refusal(load_tasks, TaskRequest(("hellaswag",), {"hellaswag": path}))
    assert message.startswith(f"--task-data hellaswag={path}: cannot be used")
    assert "schema of Rowan/hellaswag" in message


def test_more_examples_than_documents_are_refused():
    request = TaskRequest(("hellaswag",), {"hellaswag": HELLASWAG}, num_fewshot=6)
    assert refusal(load_tasks, request) == (
        "--num-fewshot 6: hellaswag has 5 documents to take examples from; give fewer"
    )


def test_close_names_are_named():
    message = refusal(module._require_known, ("helaswag",), ["hellaswag", "wikitext"])
    assert message.startswith("--tasks helaswag: ")
    assert message.endswith("close ones are hellaswag")


def test_tasks_of_ones_own_are_found(tmp_path):
    loaded = load_tasks(generating_task(tmp_path, [{"question": "a", "answer": "b"}]))
    assert loaded.generating() == ["generate"]
    loaded.check_stages(1)
    message = refusal(loaded.check_stages, 2)
    assert message.startswith("--tasks generate: ")
    assert "--pipeline-model-parallel-size 1 instead of 2" in message


def test_tasks_that_run_what_the_model_writes_are_refused(tmp_path):
    request = generating_task(tmp_path, [{"question": "a", "answer": "b"}])
    with (tmp_path / "generate.yaml").open("a") as definition:
        definition.write("unsafe_code: true\n")
    assert refusal(load_tasks, request).startswith("--tasks generate: runs code")


def test_nothing_of_the_harness_is_printed(capfd):
    load_tasks(TaskRequest(("wikitext",), {"wikitext": WIKITEXT}))
    assert capfd.readouterr() == ("", "")
    assert "DISABLE_MULTIPROC" not in os.environ


def test_a_missing_harness_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert "pip install 'megatron_attnres[eval]'" in refusal(module.require_harness)
