"""What the data cannot carry is said, and what they can carry is not doubted."""

import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_attnres.analysis.scaling_laws.fits.cautions import cautions_of
from megatron_attnres.analysis.scaling_laws.fits.power_law import Form, PowerLaw
from megatron_attnres.analysis.scaling_laws.fits.study import Measurements, Question, study_of
from megatron_attnres.analysis.scaling_laws.measurements.learning_rates import Choice
from megatron_attnres.errors import InputError
from tests.analysis.scaling_laws.synthetic import PAPER, points_of

QUESTION = Question((Form.POWER,), None, None, 200, 1)
APART = (PowerLaw(2.0, 0.05), PowerLaw(1.8, 0.06))
WIDE = tuple(np.geomspace(0.1, 100, 7).tolist())


def study(laws=APART, question=QUESTION, choices=(), **keys):
    first = points_of("baseline", laws[0], **keys)
    second = points_of("full", laws[1], **(keys | {"seed": 99}))
    return study_of(Measurements((*first, *second), choices=choices), question)


def cautions(*arguments, **keys):
    return "\n".join(cautions_of(study(*arguments, **keys)))


def test_good_data_are_not_doubted():
    near = (PowerLaw(2.0, 0.05), PowerLaw(1.95, 0.051))
    assert cautions(near, computes=WIDE, seeds=2, noise=1e-4) == ""


def test_few_sizes_and_single_seeds():
    text = cautions(computes=(1.0, 3.0, 9.0))
    assert "baseline: 3 sizes; fewer than 4 show no law" in text
    assert "full: no size has two seeds" in text


def test_two_sizes_have_no_intervals():
    text = cautions(computes=(1.0, 3.0))
    assert "baseline, form power: as many constants as points, so there are no intervals" in text


def test_no_difference_is_shown():
    text = cautions((APART[0], APART[0]), noise=0.01)
    assert "full over baseline, form power: the compute advantage's interval at the chosen" in text
    assert "over the measured range" in text
    assert "holds 1: no difference is shown" in text
    assert "the exponents' intervals overlap" in text


def test_extrapolation_says_how_far():
    text = cautions(question=replace(QUESTION, at=58.0), noise=1e-4)
    assert (
        "extrapolation: 58 PFLOP/s-days lie a factor 10 outside of what baseline measures" in text
    )
    below = cautions(question=replace(QUESTION, at=0.07), noise=1e-4)
    assert "0.07 PFLOP/s-days lie a factor 10 outside of what full measures (0.7 to 5.8)" in below


def test_a_factor_that_reads_the_reference_far_beyond_its_runs():
    text = cautions(noise=1e-4)
    assert "beyond its largest compute" in text


def test_curves_that_share_no_compute():
    points = [
        *points_of("baseline", APART[0], (1, 2, 3, 4)),
        *points_of("full", APART[1], (10, 20, 30, 40)),
    ]
    found = study_of(Measurements(tuple(points)), QUESTION)
    assert found.comparisons[0].over_range is None
    assert "both measure no compute in common" in "\n".join(cautions_of(found))


def test_an_offset_that_is_not_identified():
    question = replace(QUESTION, forms=(Form.OFFSET,))
    text = cautions((PAPER["baseline"], PAPER["block4"]), question, noise=0.01)
    assert "baseline, form offset: the offset is not identified: its interval is 0 to " in text


def test_a_bend_in_the_residuals():
    bent = (PowerLaw(0.5, 0.5, 1.5), PowerLaw(0.4, 0.5, 1.5))
    assert "baseline, form power: the residuals bend" in cautions(bent, computes=WIDE, noise=1e-4)
    assert "bend" not in cautions(computes=WIDE, noise=1e-12)


def test_seeds_that_differ_more_than_curves():
    near = (APART[0], PowerLaw(1.999, 0.05))
    assert "seeds of one size spread by" in cautions(near, seeds=2, noise=0.01)


def test_a_learning_rate_at_the_edge():
    choice = Choice("full", "s1", 0.01, (0.003, 0.01))
    text = cautions(choices=(choice, replace(choice, tried=(0.003, 0.01, 0.03))))
    assert text.count("is at the edge of those tried (0.003, 0.01)") == 1


def test_a_form_that_has_too_few_points_is_told_or_refused():
    both = replace(QUESTION, forms=tuple(Form))
    assert "full: 3 points are too few for the form offset" in cautions(
        question=both, computes=(1.0, 3.0, 9.0)
    )
    with pytest.raises(InputError, match="--form offset: curve baseline has 3 points"):
        study(question=replace(QUESTION, forms=(Form.OFFSET,)), computes=(1.0, 3.0, 9.0))


def test_the_reference_is_the_baseline_or_what_is_asked():
    assert study().comparisons[0].reference.curve.name == "baseline"
    other = study(question=replace(QUESTION, reference="full")).comparisons[0]
    assert (other.reference.curve.name, other.other.curve.name) == ("full", "baseline")
    assert other.at.factor == pytest.approx(1 / study_factor(other), rel=1e-3)
    with pytest.raises(InputError, match="--baseline block: no such curve; there are baseline, f"):
        study(question=replace(QUESTION, reference="block"))


def study_factor(other):
    """Of full over baseline where full is as good as the baseline at the asked compute."""
    loss = other.other.law.loss(other.compute)
    return other.compute / other.reference.law.compute(loss)


def test_the_chosen_compute_is_what_both_reach():
    points = [
        *points_of("baseline", APART[0], (1, 2, 3, 4)),
        *points_of("full", APART[1], (1, 2, 3)),
    ]
    found = study_of(Measurements(tuple(points)), QUESTION).comparisons[0]
    assert found.compute == pytest.approx(3)
    assert math.isclose(found.over_range.high, found.compute)
