"""Tables in columns."""

from megatron_attnres.text_table import table_lines


def test_texts_stand_left_and_figures_right():
    rows = [("run", "loss"), ("long name", "4.5"), ("b", "12.25")]
    assert list(table_lines(rows, 1)) == ["run         loss", "long name    4.5", "b          12.25"]
    assert list(table_lines(rows, 2)) == ["run        loss", "long name  4.5", "b          12.25"]
