import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topovq.grid import Grid, balanced_shape

# Shapes


@pytest.mark.parametrize("shape", [(2, 3), [2, 3], torch.Size([2, 3])])
def test_a_shape_is_a_tuple_a_list_or_a_size(shape):
    grid = Grid(shape)
    assert grid.shape == (2, 3)
    assert (grid.ndim, grid.size) == (2, 6)
    assert grid.topology == "rectangular"
    assert grid.wrap == (False, False)


def test_an_int_is_a_line():
    assert Grid(5).shape == (5,)
    assert Grid(5) == Grid((5,)) == Grid([5])


@pytest.mark.parametrize(
    ("size", "ndim", "shape"),
    [
        (512, 2, (16, 32)),
        (1024, 2, (32, 32)),
        (16384, 2, (128, 128)),
        (12, 2, (3, 4)),
        (36, 2, (6, 6)),
        (14, 2, (2, 7)),  # 3.5 times as long as wide: the last that passes for balanced
        (1, 2, (1, 1)),
        (512, 3, (8, 8, 8)),
        (60, 3, (3, 4, 5)),
        (262144, 3, (64, 64, 64)),
        (7, 1, (7,)),
        (1, 3, (1, 1, 1)),
    ],
)
def test_balanced_shapes(size, ndim, shape):
    assert Grid.balanced(size, ndim).shape == shape


@pytest.mark.parametrize(
    ("size", "ndim", "nearby"),
    [
        (11, 3, ("8", "12")),  # 2 x 2 x 2 and 2 x 2 x 3; 9 and 10 have only two factors
        (13, 3, ("12", "16")),  # 2 x 2 x 3 and 2 x 2 x 4; 14 and 15 have only two factors
    ],
)
def test_a_size_that_factors_badly_is_refused_with_sizes_that_work(size, ndim, nearby):
    with pytest.raises(ValueError, match=f"^{size} codes make no balanced {ndim}-D grid") as error:
        Grid.balanced(size, ndim)
    assert f"nearby sizes that do: {', '.join(nearby)} (" in str(error.value)
    assert f"grid={size} for a line" in str(error.value)


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        (2, (1, 2)),
        (3, (2, 2)),
        (5, (2, 3)),
        (7, (3, 3)),  # 2 x 4 has one place less, but is twice as long as wide
        (11, (3, 4)),
        (22, (5, 5)),  # 2 x 11 is too long
        (39, (6, 7)),  # 3 x 13 is over 4 times as long as wide
        (509, (21, 25)),  # 525 places; 20 x 26 = 520 are 1.3 times as long as wide
        (8191, (82, 100)),
        (8196, (82, 100)),
        (262_147, (490, 535)),
    ],
)
def test_a_size_that_factors_badly_leaves_the_end_of_the_last_row_empty(size, shape):
    grid = Grid.balanced(size)
    assert (grid.shape, grid.size, grid.places) == (shape, size, math.prod(shape))
    assert grid == Grid(shape, size=size)


@given(st.integers(1, 20_000))
def test_every_size_has_a_map(size):
    grid = Grid.balanced(size)
    rows, columns = grid.shape
    assert grid.size == size
    assert 0 <= grid.places - size < columns
    if balanced_shape(size, 2) is not None:
        assert grid.shape == balanced_shape(size, 2)
        assert grid.places == size
    else:  # nothing that is as square has fewer places
        assert rows <= columns <= max(1.25 * rows, rows + 1)
        for other in range(1, 2 * rows):
            wide = math.ceil(size / other)
            assert other * wide >= grid.places or not other <= wide <= 1.25 * other


@given(st.integers(1, 3000), st.integers(1, 3))
def test_a_balanced_shape_holds_all_codes_and_is_not_long(size, ndim):
    shape = balanced_shape(size, ndim)
    if shape is not None:
        assert math.prod(shape) == size
        assert len(shape) == ndim
        assert list(shape) == sorted(shape)
        assert shape[-1] <= 4 * shape[0] or ndim == 1


def test_balanced_passes_topology_and_wrap_on():
    grid = Grid.balanced(24, topology="hexagonal", wrap=(True, False))
    assert (grid.shape, grid.topology, grid.wrap) == ((4, 6), "hexagonal", (True, False))


# Places


def test_coords_are_row_major():
    assert Grid((2, 3)).coords().tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert Grid((2, 3, 4)).coords(torch.tensor([[0, 23], [12, 7]])).tolist() == [
        [[0, 0, 0], [1, 2, 3]],
        [[1, 0, 0], [0, 1, 3]],  # 12 = 1*12; 7 = 0*12 + 1*4 + 3
    ]


def test_places_may_be_plain_numbers():
    grid = Grid((2, 3))
    assert grid.coords(4).tolist() == [1, 1]
    assert grid.coords([0, 5]).tolist() == [[0, 0], [1, 2]]
    assert grid.shift(0, 1).item() == 4
    assert grid.distance([0, 3], 5).tolist() == pytest.approx([5**0.5, 2])


def test_index_of_coords():
    grid = Grid((2, 3))
    assert grid.index((1, 2)).tolist() == 5
    assert grid.index([[0, 1], [1, 0]]).tolist() == [1, 3]
    assert grid.index(torch.tensor([1, 1], dtype=torch.int32)).dtype == torch.int64


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_index_and_coords_are_inverse(shape):
    grid = Grid(shape)
    assert grid.index(grid.coords()).tolist() == list(range(grid.size))


# A last row that is partly empty:
#     0 1 2 3
#     4 5 6 7
#     8 9
RAGGED = Grid((3, 4), size=10)


def test_places_of_a_map_whose_last_row_is_partly_empty():
    assert (RAGGED.size, RAGGED.places, RAGGED.ndim) == (10, 12, 2)
    assert RAGGED.full == Grid((3, 4))
    assert Grid((3, 4)).full == Grid((3, 4)) == Grid((3, 4), size=12)
    assert RAGGED.coords().tolist() == Grid((3, 4)).coords().tolist()[:10]
    assert RAGGED.index(RAGGED.coords()).tolist() == list(range(10))
    assert torch.equal(RAGGED.distance_matrix(), Grid((3, 4)).distance_matrix()[:10, :10])
    with pytest.raises(ValueError, match=r"the place at coords \[2, 3\] holds no code: the last one is at \[2, 1\]"):
        RAGGED.index([[2, 1], [2, 3]])
    with pytest.raises(ValueError, match=r"place 10 is out of range: expected 0 to 9$"):
        RAGGED.coords(10)


def test_a_shift_never_leads_to_an_empty_place():
    every = torch.arange(10)
    # Down: columns 2 and 3 end a row earlier. Right: the last row ends at 9.
    assert RAGGED.shift(every, (1, 0)).tolist() == [4, 5, 6, 7, 8, 9, 6, 7, 8, 9]
    assert RAGGED.shift(every, (5, 0)).tolist() == [8, 9, 6, 7, 8, 9, 6, 7, 8, 9]
    assert RAGGED.shift(every, (0, 1)).tolist() == [1, 2, 3, 3, 5, 6, 7, 7, 9, 9]
    # Over a corner: from 4 to 9, from 5 and 6 to the ends of columns 2 and 3; from the last row to its end.
    assert RAGGED.shift(every, (1, 1)).tolist() == [5, 6, 7, 7, 9, 6, 7, 7, 9, 9]
    assert RAGGED.shift(every, (1, -2)).tolist() == [4, 4, 4, 5, 8, 8, 8, 9, 8, 8]
    assert RAGGED.shift([-1, 9], (0, 2)).tolist() == [-1, 9]
    # Up from the first row of a ring: columns 2 and 3 have their end one row higher.
    assert RAGGED.shift(every, (-1, 0), wrap=True).tolist() == [8, 9, 6, 7, 0, 1, 2, 3, 4, 5]


@given(st.integers(3, 60), st.data(), st.sampled_from([None, True, False]))
def test_shifts_of_any_map_lead_to_codes(size, data, wrap):
    grid = Grid.balanced(size, wrap=data.draw(st.booleans()))
    offset = data.draw(st.lists(st.integers(-70, 70), min_size=2, max_size=2))
    there = grid.shift(torch.arange(size), offset, wrap=wrap)
    assert there.min() >= 0
    assert there.max() < size
    straight = grid.full.shift(torch.arange(size), offset, wrap=wrap)
    assert torch.equal(there[straight < size], straight[straight < size])


# Distances


def test_distances_on_a_line_and_a_ring():
    assert Grid(4).distance_matrix()[0].tolist() == [0, 1, 2, 3]
    assert Grid(4, wrap=True).distance_matrix()[0].tolist() == [0, 1, 2, 1]
    assert Grid(5, wrap=True).distance_matrix()[0].tolist() == [0, 1, 2, 2, 1]
    assert Grid(2, wrap=True).distance_matrix()[0].tolist() == [0, 1]
    assert Grid(1, wrap=True).distance_matrix().tolist() == [[0]]


def test_distances_on_a_square():
    assert Grid((2, 2)).distance_matrix().tolist() == [
        [0, 1, 1, math.sqrt(2)],
        [1, 0, math.sqrt(2), 1],
        [1, math.sqrt(2), 0, 1],
        [math.sqrt(2), 1, 1, 0],
    ]
    assert Grid((4, 5)).distance(0, 19).item() == 5  # (0, 0) to (3, 4)


def test_distances_wrap_on_the_axes_that_wrap():
    # From (0, 0) to (3, 4) of a 4 x 5 grid: 3 rows and 4 columns, or 1 row and 1 column the other way round.
    for wrap, expected in [
        (False, 5),
        ((True, False), math.sqrt(1 + 16)),
        ((False, True), math.sqrt(9 + 1)),
        (True, math.sqrt(2)),
    ]:
        assert Grid((4, 5), wrap=wrap).distance(0, 19).item() == pytest.approx(expected)


def test_distance_broadcasts():
    grid = Grid((2, 3))
    assert grid.distance(torch.arange(6)[:, None], torch.arange(6)).shape == (6, 6)
    assert grid.distance(torch.tensor([0, 1]), 2).tolist() == [2, 1]
    assert grid.distance(0, 1).dtype == torch.float64


# Hexagons


def test_hexagonal_positions():
    # Rows are sqrt(3)/2 apart and odd ones half a cell to the right.
    h = 0.8660254037844386
    expected = [[0, 0], [0, 1], [h, 0.5], [h, 1.5], [2 * h, 0], [2 * h, 1]]
    assert torch.allclose(Grid((3, 2), topology="hexagonal").positions(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("row", [2, 3])
def test_a_hexagon_has_six_neighbors_at_distance_1(row):
    grid = Grid((6, 6), topology="hexagonal")
    apart = grid.distance(grid.index((row, 2)), torch.arange(36))
    near = grid.coords()[(apart - 1).abs() < 1e-12].tolist()
    side = 1 if row % 2 else -1  # in the rows above and below: the same column, and the one toward the odd row's shift
    assert sorted(near) == sorted(
        [[row, 1], [row, 3], [row - 1, 2], [row - 1, 2 + side], [row + 1, 2], [row + 1, 2 + side]]
    )
    assert ((apart > 0) & (apart < 1 - 1e-12)).sum() == 0
    # The next ones are sqrt(3) away.
    assert apart[apart > 1 + 1e-12].min().item() == pytest.approx(math.sqrt(3))


def test_every_hexagon_of_a_torus_has_six_neighbors():
    apart = Grid((4, 5), topology="hexagonal", wrap=True).distance_matrix()
    assert ((apart - 1).abs() < 1e-12).sum(1).tolist() == [6] * 20


def test_a_hexagonal_torus_needs_an_even_number_of_rows():
    with pytest.raises(ValueError, match=r"shape \(5, 4\) has 5; use 6 rows or wrap=\(False, True\)"):
        Grid((5, 4), topology="hexagonal", wrap=True)
    assert Grid((5, 4), topology="hexagonal", wrap=(False, True)).periods == (math.inf, 4.0)
    height, width = Grid((6, 4), topology="hexagonal", wrap=(True, False)).periods
    assert height == pytest.approx(3 * math.sqrt(3))
    assert width == math.inf


# Shifts


@pytest.mark.parametrize(
    "grid",
    [
        Grid(5),
        Grid(5, wrap=True),
        Grid((3, 4), wrap=(True, False)),
        Grid((3, 5), size=12),
        Grid((2, 3, 4)),
        Grid((4, 5), topology="hexagonal"),
        Grid((4, 5), topology="hexagonal", wrap=True),
    ],
    ids=str,
)
def test_the_place_nearest_to_a_point(grid):
    every = torch.arange(grid.size)
    points = grid.positions(every)
    assert torch.equal(grid.at(points), every)
    assert torch.equal(grid.at(points + 0.4), every)
    assert torch.equal(grid.at(points - 0.4), every)
    around = torch.tensor([period if math.isfinite(period) else 0.0 for period in grid.periods])
    assert torch.equal(grid.at(points + around), every)
    beyond = torch.tensor([0.0 if math.isfinite(period) else 99.0 for period in grid.periods])
    if beyond.any():
        assert (grid.at(points + beyond) == -1).all()
        assert (grid.at(points - beyond) == -1).all()


def test_no_code_is_nearest_to_an_empty_place():
    assert Grid((2, 3), size=4).at(torch.tensor([[1, 0], [1, 1], [1, 2], [0, 2]])).tolist() == [3, -1, -1, 2]


def test_shift_stops_at_open_borders():
    # 0 1 2
    # 3 4 5
    grid = Grid((2, 3))
    every = torch.arange(6)
    assert grid.shift(every, (0, 1)).tolist() == [1, 2, 2, 4, 5, 5]
    assert grid.shift(every, (0, -2)).tolist() == [0, 0, 0, 3, 3, 3]
    assert grid.shift(every, (1, 0)).tolist() == [3, 4, 5, 3, 4, 5]
    assert grid.shift(every, 1).tolist() == [4, 5, 5, 4, 5, 5]
    assert grid.shift(every, [9, -9]).tolist() == [3] * 6


def test_shift_goes_round_on_axes_that_wrap():
    grid = Grid((2, 3), wrap=(False, True))
    assert grid.shift(torch.arange(6), (0, 1)).tolist() == [1, 2, 0, 4, 5, 3]
    assert grid.shift(torch.arange(6), (0, -4)).tolist() == [2, 0, 1, 5, 3, 4]
    assert grid.shift(torch.arange(6), (1, 1)).tolist() == [4, 5, 3, 4, 5, 3]


def test_wrap_given_to_shift_decides_for_all_axes():
    every = torch.arange(6)
    assert Grid((2, 3)).shift(every, (1, 1), wrap=True).tolist() == [4, 5, 3, 1, 2, 0]
    assert Grid((2, 3), wrap=True).shift(every, (1, 1), wrap=False).tolist() == [4, 5, 5, 4, 5, 5]


def test_shift_leaves_masked_tokens_and_shapes_alone():
    shifted = Grid((2, 3)).shift(torch.tensor([[-1, 0], [5, -1]]), (0, 1))
    assert shifted.tolist() == [[-1, 1], [5, -1]]
    assert shifted.dtype == torch.int64
    assert Grid((2, 3)).shift(torch.tensor(4), 0).tolist() == 4


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_on_a_torus_a_shift_is_undone_by_its_negative(shape, data):
    grid = Grid(shape, wrap=True)
    offset = data.draw(st.lists(st.integers(-7, 7), min_size=grid.ndim, max_size=grid.ndim))
    there = grid.shift(torch.arange(grid.size), offset)
    assert sorted(there.tolist()) == list(range(grid.size))
    assert grid.shift(there, [-step for step in offset]).tolist() == list(range(grid.size))


# Identity


def test_a_grid_survives_its_description():
    grid = Grid((4, 3), topology="hexagonal", wrap=(True, False))
    assert grid.to_dict() == {"shape": [4, 3], "topology": "hexagonal", "wrap": [True, False]}
    again = Grid.from_dict(grid.to_dict())
    assert again == grid
    assert hash(again) == hash(grid)
    assert grid != Grid((4, 3), topology="hexagonal")
    assert grid != "a grid"
    assert repr(grid) == "Grid((4, 3), topology='hexagonal', wrap=(True, False))"


def test_a_map_whose_last_row_is_partly_empty_survives_its_description():
    grid = Grid((3, 4), size=10)
    assert grid.to_dict() == {"shape": [3, 4], "size": 10, "topology": "rectangular", "wrap": [False, False]}
    again = Grid.from_dict(grid.to_dict())
    assert again == grid
    assert hash(again) == hash(grid)
    assert grid != Grid((3, 4))
    assert grid != Grid((3, 4), size=11)
    assert repr(grid) == "Grid((3, 4), size=10, topology='rectangular', wrap=(False, False))"


# Refusals


@pytest.mark.parametrize("size", [8, 13, 1])
def test_a_size_that_does_not_fit_is_refused(size):
    with pytest.raises(
        ValueError, match=r"the shape \(3, 4\), whose last row holds from 1 to 4 codes: give 9 to 12"
    ) as error:
        Grid((3, 4), size=size)
    assert f"size={size} does not fit" in str(error.value)
    assert str(Grid.balanced(size).shape) in str(error.value)


def test_only_the_last_of_several_rows_may_be_partly_empty():
    for shape in (5, (1, 5), (2, 2, 2)):
        with pytest.raises(ValueError, match=r"size=4 does not fit .* only the last of several rows of a 2-D map"):
            Grid(shape, size=4)
    for size in (2.5, True, 0):
        with pytest.raises(ValueError, match=f"size={size!r} must be an int of at least 1"):
            Grid((3, 4), size=size)


@pytest.mark.parametrize("shape", [0, -3, True, 2.5, "8x8", (), (4, 0), (4, 2.0), (True, 2), None])
def test_a_bad_shape_is_refused(shape):
    with pytest.raises(ValueError, match="must be an int or a tuple of ints, each at least 1") as error:
        Grid(shape)
    assert repr(shape) in str(error.value)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="topology='triangular' is unknown; choose one of 'rectangular', 'hexagonal'"):
        Grid((2, 2), topology="triangular")
    with pytest.raises(ValueError, match=r"hexagonal grid has 2 axes, but shape \(2, 2, 2\) has 3"):
        Grid((2, 2, 2), topology="hexagonal")
    with pytest.raises(ValueError, match=r"wrap=\(True,\) has 1 entries, but shape \(2, 2\) has 2 axes"):
        Grid((2, 2), wrap=(True,))
    for wrap in (1, "yes", (1, 0), None):
        with pytest.raises(TypeError, match="is not a bool or one bool per axis") as error:
            Grid((2, 2), wrap=wrap)
        assert f"wrap={wrap!r}" in str(error.value)
    for size in (0, -4, 2.0, True):
        with pytest.raises(ValueError, match=f"size={size!r} must be an int of at least 1"):
            Grid.balanced(size)
    with pytest.raises(ValueError, match="ndim=0 must be an int of at least 1"):
        Grid.balanced(8, 0)


def test_bad_places_are_refused():
    grid = Grid((2, 3))
    with pytest.raises(ValueError, match=r"coords \[1, 3\] lie off the grid of shape \(2, 3\)"):
        grid.index([[0, 0], [1, 3]])
    with pytest.raises(ValueError, match=r"coords \[-1, 0\] lie off the grid"):
        grid.index((-1, 0))
    with pytest.raises(ValueError, match=r"coords of shape \(3,\) must end in 2"):
        grid.index((0, 0, 0))
    with pytest.raises(TypeError, match=r"coords must be integers, got torch.float32"):
        grid.index((0.0, 1.0))
    with pytest.raises(TypeError, match=r"indices must be integers, got torch.bool"):
        grid.coords(torch.tensor([True]))
    for call in (lambda: grid.coords(6), lambda: grid.distance(0, 6), lambda: grid.shift([0, 6], 1)):
        with pytest.raises(ValueError, match=r"place 6 is out of range: expected 0 to 5$"):
            call()
    with pytest.raises(ValueError, match=r"place -1 is out of range: expected 0 to 5$"):
        grid.coords(torch.tensor([2, -1]))
    for offset in ((1,), (1, 2, 3), (1, 0.5), 1.5, "ab"):
        with pytest.raises(ValueError, match="must be an int or 2 ints") as error:
            grid.shift(torch.arange(6), offset)
        assert f"offset={offset!r}" in str(error.value)
    with pytest.raises(TypeError, match=r"indices must be integers, got torch.float32"):
        grid.shift(torch.rand(3), 1)
