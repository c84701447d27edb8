"""Log probabilities and greedy flags are the model's own on every layout, on some to the bit."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import distributed

from megatron_attnres.evaluation.job import build_trained
from megatron_attnres.evaluation.perplexity.documents import Document
from megatron_attnres.evaluation.perplexity.perplexity import measure_perplexity
from megatron_attnres.evaluation.scoring import chunk as scoring_chunk
from megatron_attnres.evaluation.scoring.chunk import likeliest_ids
from megatron_attnres.evaluation.scoring.windows import Window
from megatron_attnres.parallel.groups import initialize_groups
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.checkpoints.stored_model import find_stored_model
from tests.distributed import GROUP_TIMEOUT, restart_job, run_ranks
from tests.evaluation.scored_models import (
    ALL_AT_ONCE,
    CONTEXT,
    EOD,
    LAYOUTS_OF,
    MODES,
    ONE,
    REAL_IDS,
    VIRTUAL,
    make_models,
    on_every_layout,
    open_scorer,
    whole_logits,
)

STRIDE = 20


def some_windows():
    """Of all lengths, with ids of the padded part too: what pads is never scored itself."""
    generator = np.random.default_rng(0)
    windows = []
    for length in [CONTEXT, 1, *generator.integers(1, CONTEXT + 1, 38)]:
        tokens = generator.integers(0, REAL_IDS, length + 1)
        windows.append(Window(tokens, int(generator.integers(1, length + 1))))
    return windows


def some_documents():
    generator = np.random.default_rng(1)
    lengths = (3 * CONTEXT + 5, 1, CONTEXT, 17)
    return [
        Document(generator.integers(0, EOD, length), length // 3 + 1, 4 * length)
        for length in lengths
    ]


class NOTHING:
    """What a rank that is not the first knows of a window."""

    total = 0.0


def measured(scorer):
    """Scores of the windows, and perplexity, which only rank 0 can add up."""
    scores = scorer.score(some_windows())

    def score(windows):
        # Every rank cuts the same windows: none needs to lead.
        return scorer.score(windows) or [NOTHING] * len(windows)

    perplexity = measure_perplexity(some_documents(), score, EOD, CONTEXT, STRIDE)
    return [(one.log_probabilities, one.greedy) for one in scores], perplexity


def measured_on(models):
    return on_every_layout(models, LAYOUTS_OF[distributed.get_world_size()], measured)


def direct(models):
    """From whole logits: log probabilities and whether the label is the likeliest real id."""
    windows = some_windows()
    found = {}
    for mode, folder in models.items():
        groups = initialize_groups(ONE, GROUP_TIMEOUT)
        step = build_trained(find_stored_model(str(folder)), groups, "fp32")
        model = step.chunks[0].module
        found[mode] = []
        for window in windows:
            logits = whole_logits(model, window.tokens[:-1])
            labels = torch.as_tensor(window.tokens[1:])
            chosen = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
            greedy = logits[:, :REAL_IDS].argmax(-1) == labels
            found[mode].append((chosen[-window.scored :].numpy(), greedy[-window.scored :].numpy()))
        restart_job()
    return found


def in_one_process(models):
    return direct(models), measured_on(models), refused(models)


def refused(models):
    """What a window that is too long leads to, and what no window does."""
    scorer = open_scorer(models["block"], ONE)
    try:
        scorer.score([Window(np.zeros(CONTEXT + 2, dtype=np.int64), 1)])
    except ValueError as error:
        return str(error), scorer.score([])
    finally:
        restart_job()
    return None


def in_two_processes(models):
    return measured_on(models), sliced(models), told(models)


def sliced(models):
    """Log probabilities with logits of a few positions at a time, and of all."""
    found = []
    whole = scoring_chunk._MOST_LOGITS
    for most in (whole, 500):
        scoring_chunk._MOST_LOGITS = most
        for layout in LAYOUTS_OF[2][1:]:
            scores = open_scorer(models["block"], layout).score(some_windows())
            found.append([one.log_probabilities for one in scores])
            restart_job()
    scoring_chunk._MOST_LOGITS = whole
    return found


def told(models):
    positions = []
    open_scorer(models["block"], VIRTUAL, progress=positions.append).score(some_windows())
    restart_job()
    return sum(positions)


def in_four_processes(models):
    everything = on_every_layout({"block": models["block"]}, [ALL_AT_ONCE], measured)
    return measured_on(models) | everything


@dataclass
class Found:
    """What the ranks found.

    Attributes:
        reference: from whole logits, by mode.
        scored: by mode and layout.
        refused, sliced, told: see the functions.
    """

    reference: dict
    scored: dict
    refused: tuple
    sliced: list
    told: int


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    models = make_models(tmp_path_factory.mktemp("models"))
    reference, scored, refusal = run_ranks(in_one_process, 1, models)[0]
    more, slices, positions = run_ranks(in_two_processes, 2, models)[0]
    scored |= more | run_ranks(in_four_processes, 4, models)[0]
    return Found(reference, scored, refusal, slices, positions)


def test_every_layout_gives_the_models_log_probabilities(results):
    for (mode, layout), (scores, _) in results.scored.items():
        pairs = zip(results.reference[mode], scores, strict=True)
        for (wanted, wanted_greedy), (got, got_greedy) in pairs:
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-5, err_msg=str(layout))
            assert np.array_equal(got_greedy, wanted_greedy), (mode, layout)
    flags = np.concatenate([greedy for _, greedy in results.reference["block"]])
    assert flags.any() and not flags.all()


def test_perplexity_is_the_same_on_every_layout(results):
    assert len(results.scored) == len(MODES) * sum(map(len, LAYOUTS_OF.values())) + 1
    for (mode, layout), (_, perplexity) in results.scored.items():
        wanted = results.scored[mode, ONE][1]
        assert perplexity.nats == pytest.approx(wanted.nats, rel=1e-6), (mode, layout)
        assert perplexity.figures == pytest.approx(wanted.figures, rel=1e-6)
        assert perplexity.tokens == sum(len(one.tokens) for one in some_documents())


def test_stages_and_replicas_change_no_bit(results):
    for (mode, layout), (scores, perplexity) in results.scored.items():
        if layout.tensor == 1:
            wanted, wanted_perplexity = results.scored[mode, ONE]
            assert perplexity == wanted_perplexity, (mode, layout)
            for (one, _), (other, _) in zip(wanted, scores, strict=True):
                assert np.array_equal(one, other), (mode, layout)


def test_slices_of_the_sequence_come_back_in_their_places(results):
    whole, whole_sharded, cut, cut_sharded = results.sliced
    for one, other in ((whole, cut), (whole_sharded, cut_sharded)):
        for wanted, got in zip(one, other, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-5)


def test_progress_counts_positions_without_padding(results):
    assert results.told == sum(window.length for window in some_windows())


def test_a_window_beyond_the_context_is_refused(results):
    message, nothing = results.refused
    assert f"{CONTEXT + 1} positions" in message
    assert nothing == []


def largest_of_halves(vocabulary):
    tp = initialize_groups(ParallelLayout(2), GROUP_TIMEOUT).collection.tp
    generator = torch.Generator().manual_seed(0)
    # Few values, so that ties are everywhere.
    logits = torch.randint(0, 3, (7, 5, vocabulary), generator=generator).float()
    own = logits.chunk(2, dim=-1)[tp.rank()]
    return logits, {real: likeliest_ids(own, real, tp) for real in (None, 9, 6, 3)}


def test_padding_is_never_the_likeliest_and_the_lowest_id_wins():
    for logits, by_real_ids in run_ranks(largest_of_halves, 2, 12):
        for real_ids, found in by_real_ids.items():
            assert torch.equal(found, logits[..., :real_ids].argmax(-1)), real_ids
