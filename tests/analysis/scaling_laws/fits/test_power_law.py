"""Losses and computes of a law undo each other."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.analysis.scaling_laws.fits.power_law import PowerLaw


@given(
    st.floats(0.1, 10), st.floats(0.03, 1), st.floats(0, 3), st.floats(-10, 3).map(lambda p: 10**p)
)
def test_compute_undoes_loss(coefficient, exponent, offset, compute):
    law = PowerLaw(coefficient, exponent, offset)
    # What rounding of the loss leaves of the part above the offset.
    lost = 1e-15 * law.loss(compute) / (law.loss(compute) - offset) / exponent
    assert law.compute(law.loss(compute)) == pytest.approx(compute, rel=max(1e-9, 10 * lost))


def test_below_the_offset_no_compute_is_enough():
    assert PowerLaw(1.0, 0.1, 2.0).compute(2.0) == math.inf
    assert PowerLaw(1.0, 1e-3, 2.0).compute(2.0001) == math.inf
