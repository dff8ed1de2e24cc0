"""The extensions of the pages: tables from CSV files, and docstrings as reStructuredText."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "_ext"))

import docstrings
import results


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "made.csv"
    file.write_text(
        "method,K,way,loss,std,n,hardware,commit\n"
        'ema,512,"bf16, graph",2.5,0.25,3,a GPU,0123456789\n'
        "ksom,512,eager,1.5,,1,a GPU,1112223 0123456\n"
        "ksom,1024,eager,4,,1,a GPU,1112223\n"
    )
    return results.read(str(file))


def test_numbers_are_numbers_and_empty_values_are_not_there(rows):
    assert rows[0]["loss"] == 2.5
    assert rows[2]["K"] == 1024
    assert rows[0]["commit"] == "0123456789"
    assert "std" not in rows[1]


def test_rows_are_chosen_by_their_values(rows):
    assert results.chosen(rows, results.pairs("method=ema,other; K=512")) == rows[:1]
    assert results.chosen(rows, results.pairs(r"way=bf16\, graph")) == rows[:1]
    assert results.chosen(rows, results.pairs("method=vq; K=512")) == []
    with pytest.raises(ValueError, match="no row has a column 'size'"):
        results.chosen(rows, {"size": "512"})


def test_cells_leave_out_what_was_not_measured(rows):
    form = "{loss:.2f} ± {std:.2f}"
    assert [results.cell(form, row, {}) for row in rows] == ["2.50 ± 0.25", "1.50", "4.00"]
    assert results.cell("{method}", rows[0], {"ema": "EMA-VQ"}) == "EMA-VQ"
    assert results.cell("{absent}", rows[0], {}) == ""


def test_a_name_with_digits_keeps_its_suffix():
    assert results.cell("[{a}](results-256.md)", {"a": "x"}, {}) == "[x](results-256.md)"
    assert results.cell("{a:#.3g}", {"a": 378.2}, {}) == "378"


def test_a_cell_may_show_the_smallest_of_what_was_measured():
    row = {"ms": {"a": 10.0, "b": 9.5, "c": 1_200.0}}
    form = "{ms[c]:,.0f} least {ms[a]:.1f} (a) least {ms[b]:.1f} (b) least {ms[absent]:.1f}"
    assert results.cell(form, row, {}) == "9.5 (b)"
    assert results.cell("{ms[x]} least {ms[y]}", row, {}) == ""


def test_columns_that_nobody_measured_are_left_out():
    assert results.measured(["a", "b", "c"], [["1", "", ""], ["", "", "2"]]) == (["a", "c"], [["1", ""], ["", "2"]])


def test_rows_are_merged_across_a_column(rows):
    small, large = results.merged(rows, ["K"], ["method"])
    assert results.cell("{K}: {loss[ema]:.1f}, {loss[ksom]:.1f}", small, {}) == "512: 2.5, 1.5"
    assert results.cell("{loss[ema]:.1f}", large, {}) == ""


def test_numbers_are_keys_as_in_a_format_string(rows):
    _, ksom = results.merged(rows, ["method"], ["K"])
    assert results.cell("{loss[512]} {loss[1024]}", ksom, {}) == "1.5 4"


def test_rows_that_agree_are_averaged(rows):
    (ksom,) = results.merged(rows[1:], ["method"], ["way"])
    assert ksom["loss"]["eager"] == 2.75


def test_rows_are_ordered_by_their_numbers(rows):
    assert [row["K"] for row in results.ordered(rows[::-1], ["K", "loss"])] == [512, 512, 1024]
    assert results.ordered(rows[::-1], ["K", "loss"])[0]["loss"] == 1.5
    assert results.ordered(rows[::-1], []) == rows[::-1]
    with pytest.raises(ValueError, match="cannot be sorted by 'std'"):
        results.ordered(rows, ["std"])


def test_the_caption_says_n_hardware_and_commits_once(rows):
    assert results.facts(rows) == "n = 3, 1; a GPU; commit 0123456, 1112223"


def test_docstrings_keep_columns_and_escape_markup():
    text = "Gives `codes_` of |x|.\n\nname    what it is\nother   something\n"
    prose, columns = docstrings.paragraphs(text)
    assert prose == r"Gives ``codes_`` of \|x\|."
    assert columns == "::\n\n    name    what it is\n    other   something"
