"""Tables in columns."""

from megatron_attnres.text_table import table_lines

ROWS = [("run", "loss"), ("long name", "4.5"), ("b", "12.25")]


def test_texts_stand_left_and_figures_right():
    assert list(table_lines(ROWS, 1)) == [
        "run         loss",
        "long name    4.5",
        "b          12.25",
    ]


def test_texts_alone():
    assert list(table_lines(ROWS, 2)) == ["run        loss", "long name  4.5", "b          12.25"]
