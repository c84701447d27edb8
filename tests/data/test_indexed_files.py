from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_attnres.data.indexed_files import check_prefix
from megatron_attnres.errors import InputError


def refused(prefix):
    with pytest.raises(InputError) as error:
        check_prefix(prefix)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"--data-path {prefix}: ")
    return message


def test_a_whole_pair(indexed):
    pair = check_prefix(indexed.output_prefix)
    dataset = IndexedDataset(indexed.output_prefix)
    assert pair.dtype == np.uint16
    assert pair.tokens == indexed.tokens
    assert pair.documents == indexed.documents
    assert np.array_equal(pair.sequence_lengths, dataset.sequence_lengths)
    everything = np.concatenate(list(dataset))
    assert np.array_equal(np.concatenate(list(pair.chunks(0, pair.tokens))), everything)
    assert np.array_equal(np.concatenate(list(pair.chunks(5, 11))), everything[5:11])


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_empty_and_truncated_files(copied_prefix, suffix):
    path = Path(copied_prefix + suffix)
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    assert str(path) in refused(copied_prefix)
    path.write_bytes(data + b"12")
    assert str(path) in refused(copied_prefix)
    path.write_bytes(b"")
    assert "is empty" in refused(copied_prefix)
    path.unlink()
    assert "does not exist" in refused(copied_prefix)


@pytest.mark.parametrize(
    ("position", "value", "reason"),
    [
        (0, b"PK", "no index"),
        (9, b"\x02", "version 2"),
        (17, b"\x07", "code 7"),
        (18, b"\0", "bytes"),
    ],
)
def test_foreign_headers(copied_prefix, position, value, reason):
    path = Path(copied_prefix + ".idx")
    data = bytearray(path.read_bytes())
    data[position : position + len(value)] = value
    path.write_bytes(data)
    assert reason in refused(copied_prefix)


def test_an_index_of_another_corpus(copied_prefix):
    path = Path(copied_prefix + ".bin")
    path.write_bytes(path.read_bytes() * 2)
    assert "truncated or from another corpus" in refused(copied_prefix)


def test_the_fingerprint_follows_the_content(copied_prefix, indexed):
    pair = check_prefix(indexed.output_prefix)
    assert check_prefix(copied_prefix).fingerprint() == pair.fingerprint()
    path = Path(copied_prefix + ".idx")
    path.write_bytes(path.read_bytes() + b"x")
    assert pair.fingerprint() != type(pair)(**{**vars(pair), "prefix": copied_prefix}).fingerprint()


edits = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=edits, length=st.none() | st.integers(0, 10**4), early=st.booleans())
def test_a_damaged_index_is_refused_or_readable(copied_prefix, indexed, edits, length, early):
    data = bytearray(Path(indexed.output_prefix + ".idx").read_bytes())
    for position, value in edits:
        data[position % (40 if early else len(data))] = value
    Path(copied_prefix + ".idx").write_bytes(data[:length])
    try:
        pair = check_prefix(copied_prefix)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        dataset = IndexedDataset(copied_prefix)
        assert sum(len(dataset[i]) for i in range(len(dataset))) == pair.tokens


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1) | st.binary().map(lambda tail: b"MMIDIDX\0\0" + tail))
def test_random_bytes_are_refused(copied_prefix, data):
    Path(copied_prefix + ".idx").write_bytes(data)
    refused(copied_prefix)
