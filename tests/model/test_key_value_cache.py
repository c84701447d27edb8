import gc
import re
import weakref

import pytest
import torch

from megatron_attnres.model.key_value_cache import KeyValueCache


def cache_of(layers=range(2, 4), max_length=5):
    return KeyValueCache(layers, 2, max_length, 3, 4, torch.float32, torch.device("cpu"))


def tokens(count, offset=0.0):
    """Keys or values of that many tokens, [count, 2, 3, 4], all different."""
    return torch.arange(count * 24, dtype=torch.float32).view(count, 2, 3, 4) + offset


def test_steps_lie_one_behind_the_other():
    cache = cache_of()
    key, value = tokens(4), tokens(4, 1000.0)
    cache.layer(2).write(key[:3], value[:3])
    cache.advance(3)
    keys, values = cache.layer(2).write(key[3:], value[3:])
    assert cache.length == cache.layer(2).length == cache.layer(3).length == 3
    cache.advance(1)
    assert cache.length == 4
    assert torch.equal(keys, key.permute(1, 2, 0, 3))
    assert torch.equal(values, value.permute(1, 2, 0, 3))


def test_layers_keep_their_own():
    cache = cache_of()
    first, _ = cache.layer(2).write(tokens(2), tokens(2))
    second, _ = cache.layer(3).write(tokens(2, 500.0), tokens(2))
    assert torch.equal(second - first, torch.full_like(first, 500.0))
    for stranger in (1, 4):
        with pytest.raises(KeyError):
            cache.layer(stranger)


def test_a_lowered_length_forgets_later_positions():
    cache = cache_of()
    cache.layer(2).write(tokens(3), tokens(3))
    cache.advance(3)
    cache.length = 1
    keys, _ = cache.layer(2).write(tokens(1, 500.0), tokens(1))
    expected = torch.cat((tokens(1), tokens(1, 500.0))).permute(1, 2, 0, 3)
    assert torch.equal(keys, expected)


def test_more_tokens_than_room_are_refused_before_anything_is_written():
    cache = cache_of()
    key = tokens(5)
    cache.layer(2).write(key[:4], key[:4])
    cache.advance(4)
    message = re.escape(
        "a sequence of 6 tokens (4 cached, 2 new) does not fit a key/value cache of max_length 5: "
        "make it with max_length 6 or more"
    )
    before = cache.layer(2).keys.clone()
    with pytest.raises(ValueError, match=message):
        cache.layer(2).write(key[:2], key[:2])
    with pytest.raises(ValueError, match=message):
        cache.advance(2)
    assert cache.length == 4
    assert torch.equal(cache.layer(2).keys[:, :, :4], before[:, :, :4])
    keys, _ = cache.layer(2).write(key[4:], key[4:])
    assert keys.shape[2] == 5


def test_memory_is_two_tensors_per_layer_and_goes_with_the_cache():
    cache = cache_of(range(3), 5)
    held = [tensor for index in range(3) for tensor in cache.layer(index)[1:]]
    storages = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    assert len(storages) == 2 * 3
    assert set(storages.values()) == {2 * 3 * 5 * 4 * 4}
    # A step's tensors are copied, and what it returns is the cache's own memory.
    keys, values = cache.layer(1).write(tokens(2), tokens(2))
    assert keys.data_ptr() in storages
    assert values.data_ptr() in storages
    gone = weakref.ref(held[0])
    gc.disable()
    try:
        del held, keys, values, cache
        assert gone() is None
    finally:
        gc.enable()
