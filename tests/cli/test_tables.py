from __future__ import annotations

import pytest

from shardset.cli.tables import Column, layout_table

COLUMNS = (
    Column("#", is_right=True),
    Column("key", is_flexible=True),
    Column("size", is_right=True, show="{:,}".format),
)


def test_numbers_stand_at_the_right_and_an_empty_cell_is_empty():
    lines = list(layout_table(COLUMNS, [(1, "a", 1000), (10, None, 5)], None))
    assert lines == [" #  key   size", " 1  a    1,000", "10           5"]


def test_a_wide_character_takes_two_columns():
    first, second, third = layout_table((Column("key"), Column("x")), [("宽宽", "a"), ("abcd", "b")], None)
    assert (first, second, third) == ("key   x", "宽宽  a", "abcd  b")


@pytest.mark.parametrize("width", [30, 40, 60])
def test_a_flexible_column_gives_way_where_the_terminal_is_narrow(width):
    lines = list(layout_table(COLUMNS, [(1, "k" * 100, 1000)], width))
    assert len(lines[1]) == width
    assert "…  1,000" in lines[1]
    assert lines[1].startswith("1  kkk")


def test_the_widest_flexible_column_gives_way_first_and_none_becomes_unreadable():
    columns = (Column("a", is_flexible=True), Column("b", is_flexible=True))
    line = list(layout_table(columns, [("x" * 50, "y" * 20)], 40))[1]
    assert "y" * 20 in line
    line = list(layout_table(columns, [("x" * 50, "y" * 20)], 10))[1]
    assert (line.count("x"), line.count("y")) == (11, 11)


def test_a_path_keeps_its_end():
    line = list(layout_table((Column("key", is_flexible=True, is_path=True),), [("a" * 50 + "/宽/000123.jpg",)], 14))[1]
    assert line == "…宽/000123.jpg"


def test_nothing_is_cut_where_no_terminal_is():
    assert "k" * 1000 in list(layout_table(COLUMNS, [(1, "k" * 1000, 1)], None))[1]


def test_a_cell_holds_no_control_characters():
    assert "\\x1b" in list(layout_table((Column("key"),), [("\x1b",)], None))[1]
