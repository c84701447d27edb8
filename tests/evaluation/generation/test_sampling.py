"""Which tokens are chosen, and that a sequence's draws are its own."""

import math

import pytest
import torch

from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.generation.sampling import Sampler
from megatron_attnres.evaluation.generation.settings import SamplingSettings, check_sampling

CPU = torch.device("cpu")
REAL_IDS, PADDED = 11, 16
PLACES = [(0, 0), (0, 1), (3, 0), (7, 2)]


def logits(batch_size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, PADDED, generator=generator)


def sampler(places=PLACES, **settings):
    return Sampler(SamplingSettings(**settings), REAL_IDS, places, CPU)


def test_greedy_takes_the_likeliest_real_id():
    scores = logits()
    scores[:, REAL_IDS:] = 100.0
    expected = scores[:, :REAL_IDS].argmax(dim=-1).tolist()
    assert sampler().choose(scores, range(4)) == expected
    assert sampler().choose(scores, [1, 3]) == [expected[1], expected[3]]


def test_ids_that_pad_the_vocabulary_are_never_drawn():
    scores = torch.zeros(4, PADDED)
    scores[:, REAL_IDS:] = 100.0
    drawing = sampler(temperature=1.0)
    drawn = {id_ for _ in range(60) for id_ in drawing.choose(scores, range(4))}
    assert drawn == set(range(REAL_IDS))


@pytest.mark.parametrize("narrowed", [{}, {"top_k": 4}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.9}])
def test_a_sequences_draws_do_not_depend_on_the_batch(narrowed):
    together = sampler(temperature=0.9, seed=5, **narrowed)
    alone = [sampler([place], temperature=0.9, seed=5, **narrowed) for place in PLACES]
    for step in range(20):
        scores = logits(seed=step)
        # Sequences come and go: the third takes part in every second step.
        taking_part = [0, 1, 2, 3] if step % 2 else [0, 1, 3]
        expected = [alone[one].choose(scores[one : one + 1], [0])[0] for one in taking_part]
        assert together.choose(scores, taking_part) == expected


def test_every_place_and_seed_has_random_numbers_of_its_own():
    scores = torch.zeros(1, 2 * PADDED).expand(4, -1)
    draws = {}
    for seed in (0, 1):
        one = Sampler(SamplingSettings(1.0, seed=seed), 2 * PADDED, PLACES, CPU)
        steps = [one.choose(scores, range(4)) for _ in range(8)]
        for place, ids in zip(PLACES, zip(*steps, strict=True), strict=True):
            draws[seed, place] = ids
    assert len(set(draws.values())) == len(draws)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_are_as_frequent_as_they_are_likely(temperature):
    draws = 4000
    row = logits(1)[:, :REAL_IDS]
    drawing = Sampler(
        SamplingSettings(temperature), REAL_IDS, [(0, index) for index in range(draws)], CPU
    )
    counts = torch.bincount(torch.tensor(drawing.choose(row.expand(draws, -1), range(draws))))
    expected = (row[0] / temperature).softmax(dim=-1)
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert ((counts / draws - expected).abs() < 4 * deviation).all()


def test_top_k_and_top_p_leave_the_likeliest():
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()
    for narrowed, expected in (
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.65}, {1, 2}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
    ):
        drawing = Sampler(SamplingSettings(1.0, **narrowed), 4, [(0, 0)], CPU)
        drawn = {id_ for _ in range(100) for id_ in drawing.choose(scores, [0])}
        assert drawn == expected, narrowed


def test_the_smallest_temperature_takes_the_likeliest():
    scores = 1e4 * logits()
    drawing = sampler(temperature=5e-324)
    assert drawing.choose(scores, range(4)) == sampler().choose(scores, range(4))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(value, temperature):
    scores = logits()
    scores[2, 3] = value
    with pytest.raises(InputError, match="not finite"):
        sampler(temperature=temperature).choose(scores, range(4))
    # A sequence that has ended is nobody's concern.
    sampler(temperature=temperature).choose(scores, [0, 1, 3])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "--temperature -0.1"),
        ({"temperature": math.nan}, "--temperature nan"),
        ({"temperature": math.inf}, "--temperature inf"),
        ({"top_k": 0}, "--top-k 0"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"top_p": 1.01}, "--top-p 1.01"),
        ({"top_p": math.nan}, "--top-p nan"),
    ],
)
def test_values_without_a_meaning_are_named(settings, message):
    with pytest.raises(InputError, match=message) as error:
        check_sampling(SamplingSettings(**settings))
    assert "\n" not in str(error.value)
