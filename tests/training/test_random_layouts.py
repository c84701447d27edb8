"""Random layouts against one process; tests/sweep_layouts.py runs more of them."""

from tests.sweep_layouts import MOST_LAYERS, TOLERANCE, differences, random_cases

CASES = random_cases(24, seed=0)


def test_random_layouts_have_the_gradients_of_one_process_and_the_bytes_of_the_plan():
    for error, name, case in differences(CASES):
        assert error < TOLERANCE, (name, case)


def test_the_draw_covers_every_feature():
    def seen(value_of):
        return {value_of(case) for case in CASES}

    assert seen(lambda case: case.layout.pipeline) == {1, 2, 3, 4}
    assert seen(lambda case: case.layout.virtual_pipeline) == {1, 2, 3, 4}
    assert seen(lambda case: case.layout.tensor) == {1, 2}
    assert seen(lambda case: case.layout.data) == {1, 2}
    assert seen(lambda case: case.layout.sequence_parallel) == {False, True}
    assert seen(lambda case: case.model.attn_res.mode) == {"block", "full", "baseline"}
    assert seen(lambda case: case.model.attn_res.sources) == {"delta", "cumulative"}
    assert seen(lambda case: case.model.tied_embeddings) == {False, True}
    assert seen(lambda case: case.recompute) == {"none", "selective", "full"}
    assert seen(lambda case: case.overlap) == {False, True}
    assert len(seen(lambda case: (case.policy, case.early_relay))) == 4
    assert any(case.layout.layers_per_chunk for case in CASES)
    assert not all(case.layout.layers_per_chunk for case in CASES)
    assert all(2 <= case.model.num_layers <= MOST_LAYERS for case in CASES)
