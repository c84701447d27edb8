"""Real text for tests of evaluation: a tokenizer, and documents in the harness' schemas."""

import json
from pathlib import Path

import yaml

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.corpora import Corpus, standard_library_folder
from megatron_attnres.data.tokenizer_training import train_tokenizer
from megatron_attnres.evaluation.tasks.request import TaskRequest

DATA = Path(__file__).parent / "data"
WIKITEXT, LAMBADA, HELLASWAG = (
    DATA / f"{name}.jsonl" for name in ("wikitext", "lambada_openai", "hellaswag")
)


def make_tokenizer(folder: Path) -> TokenizerConfig:
    """A SentencePiece model of 500 pieces."""
    model = folder / "pieces.model"
    train_tokenizer(Corpus([standard_library_folder() / "json"]), model, vocab_size=500)
    return TokenizerConfig("SentencePieceTokenizer", str(model))


def records_of(path: Path) -> list[dict]:
    """The documents of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def generating_task(folder: Path, records: list[dict], **options) -> TaskRequest:
    """A task of one's own that compares generated text with answers.

    Args:
        folder: gets its definition and documents.
        records: with ``question`` and ``answer``.
        options: of generation.
    """
    data = folder / "generate.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    definition = {
        "task": "generate",
        "output_type": "generate_until",
        "dataset_path": "json",
        "dataset_kwargs": source,
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 12, "do_sample": False, **options},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "generate.yaml").write_text(yaml.safe_dump(definition))
    return TaskRequest(("generate",), include_path=str(folder))
