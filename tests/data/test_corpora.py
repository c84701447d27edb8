import gzip
import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from megatron_attnres.data import readers
from megatron_attnres.data.corpora import Corpus, standard_library_folder
from megatron_attnres.errors import InputError

TEXTS = ["one\n", "zwei\r\n\tü", "  three ▁"]


def zstd(data):
    return pyarrow.compress(data, "zstd", asbytes=True)


def jsonl(texts, key="text"):
    return "".join(json.dumps({key: text, "id": 1}) + "\n" for text in texts).encode()


def documents(corpus):
    return [passage.text for passage in corpus]


@pytest.mark.parametrize("name", ["a.txt", "a.py", "a.txt.gz", "a.py.gz", "a.txt.zst", "a.py.zst"])
def test_a_text_file_is_one_document(tmp_path, name):
    data = TEXTS[1].encode()
    data = gzip.compress(data) if name.endswith("gz") else data
    data = zstd(data) if name.endswith("zst") else data
    (tmp_path / name).write_bytes(data)
    corpus = Corpus([tmp_path / name])
    assert documents(corpus) == [TEXTS[1]]
    assert corpus.bytes_read == corpus.bytes_on_disk == len(data)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
def test_json_lines(tmp_path, pack):
    path = tmp_path / f"a.jsonl{ {bytes: '', gzip.compress: '.gz', zstd: '.zst'}[pack] }"
    path.write_bytes(pack(jsonl(TEXTS, key="body")))
    assert documents(Corpus([path], key="body")) == TEXTS


def test_bad_lines_are_named_and_the_rest_is_read(tmp_path):
    bad = [b"{", b"\xff", b"[1]", b'{"other": "x"}', b'{"text": 3}', b'{"text": "\\ud800"}', b"no"]
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["first"]) + b"\n".join(bad) + b"\n \n" + jsonl(["last", ""]))
    told = []
    corpus = Corpus([path], report=told.append)
    assert documents(corpus) == ["first", "last"]
    assert corpus.counts.skipped_records == len(bad)
    assert corpus.counts.skipped_files == 0
    assert [f"{path}, line {n}:" in line for n, line in enumerate(told[:5], 2)] == [True] * 5
    assert told[5:] == [f"skipped {path}: 2 more such records"]


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [*TEXTS, None], "n": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    told = []
    corpus = Corpus([path], report=told.append)
    assert documents(corpus) == TEXTS
    assert corpus.counts.skipped_records == 1
    assert "row 4" in told[0]


def test_saved_dataset(tmp_path):
    from datasets import Dataset, DatasetDict

    dataset = Dataset.from_dict({"text": TEXTS, "n": [1, 2, 3]})
    dataset.save_to_disk(tmp_path / "one")
    assert documents(Corpus([tmp_path / "one"])) == TEXTS
    DatasetDict(train=dataset, test=dataset).save_to_disk(tmp_path / "two")
    with pytest.raises(InputError, match="several splits"):
        Corpus([tmp_path / "two"])
    assert documents(Corpus([tmp_path / "two" / "train"])) == TEXTS


def test_folders_are_read_in_the_order_of_names(tmp_path):
    for name in ("b/2.txt", "b/1.txt", "a.txt", "c/skip/3.txt", "z.bin", "b/old_1.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    corpus = Corpus([tmp_path], exclude=["skip", "old_*"])
    assert documents(corpus) == ["a.txt", "b/1.txt", "b/2.txt"]
    assert documents(corpus) == ["a.txt", "b/1.txt", "b/2.txt"]  # it can be read again
    assert corpus.counts.ignored_files == 1
    assert corpus.counts.documents == 3


def test_unreadable_files_are_named_counted_and_passed_by(tmp_path):
    (tmp_path / "a_latin1.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "b_truncated.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS * 99))[:-12])
    (tmp_path / "c_truncated.txt.zst").write_bytes(zstd(os.urandom(999))[:500])
    (tmp_path / "d_garbage.txt.gz").write_bytes(b"not gzip")
    (tmp_path / "e_garbage.parquet").write_bytes(b"not parquet")
    (tmp_path / "f_link.txt").symlink_to(tmp_path / "nowhere.txt")
    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS}), tmp_path / "g_column.parquet")
    (tmp_path / "h_garbage.txt.zst").write_bytes(b"not zstd")
    (tmp_path / "z_good.txt").write_text("good")
    told = []
    corpus = Corpus([tmp_path], report=told.append)
    assert documents(corpus)[-1] == "good"
    assert corpus.counts.skipped_files == 8
    assert [line.split("/")[-1].split(":")[0][0] for line in told] == list("abcdefgh")
    assert all("\n" not in line for line in told)


def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "a.txt").write_text("a")
    corpus = Corpus([tmp_path])
    assert documents(corpus) == ["a"]
    assert corpus.counts.ignored_files == 1


@pytest.mark.parametrize("text", ["ab\n" * 999, "é" * 1999, "x" * 64, "x" * 65, "\n" * 200])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
def test_a_long_text_comes_in_passages(tmp_path, monkeypatch, text, pack):
    monkeypatch.setattr(readers, "PASSAGE_BYTES", 64)
    path = tmp_path / f"a.txt{ {bytes: '', gzip.compress: '.gz', zstd: '.zst'}[pack] }"
    path.write_bytes(pack(text.encode()))
    passages = list(Corpus([path]))
    assert "".join(passage.text for passage in passages) == text
    assert [passage.ends_document for passage in passages][:-1] == [False] * (len(passages) - 1)
    assert passages[-1].ends_document
    assert all(passage.text for passage in passages)
    assert (len(passages) == 1) == (len(text.encode()) <= 64)


def test_nothing_of_a_long_undecodable_text_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PASSAGE_BYTES", 64)
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 999 + b"\xff")
    corpus = Corpus([tmp_path], report=lambda line: None)
    assert documents(corpus) == []
    assert corpus.counts.skipped_files == 1


def test_unusable_inputs_are_named(tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for path, reason in (
        (tmp_path / "missing", "no such file"),
        (tmp_path / "a.pdf", "not a kind of file"),
        (tmp_path / "empty", "nothing to read"),
    ):
        with pytest.raises(InputError, match=reason) as error:
            Corpus([path])
        assert f"--input {path}" in str(error.value)


def test_a_corpus_without_documents(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    corpus = Corpus([tmp_path])
    assert documents(corpus) == []
    with pytest.raises(InputError, match="no document"):
        corpus.require_documents()


def test_the_standard_library_is_a_corpus():
    told = []
    corpus = Corpus(
        [standard_library_folder()], exclude=["site-packages", "*.txt"], report=told.append
    )
    size = sum(len(passage.text) for passage in corpus)
    assert corpus.counts.documents > 500
    assert size > 5_000_000
    assert corpus.counts.skipped_files == len(told) < 20
