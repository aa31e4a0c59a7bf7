"""What a thinned test keeps in the fast run meets all that it should, with few cells, and is the same in every run."""

import itertools

import pytest
from support.thinned import covering

CELLS = [dict(zip("abc", values, strict=True)) for values in itertools.product(range(4), range(3), range(5))]


@pytest.mark.parametrize(
    ("sets", "fewest", "most"), [(["a", "b", "c"], 5, 7), (["a b", "c"], 12, 12), (["a b", "a c", "b c"], 20, 26)]
)
def test_every_combination_is_kept_and_few_cells_are(sets, fewest, most):
    sets = [names.split() for names in sets]
    kept = covering(CELLS, sets)
    for names in sets:
        met = {tuple(CELLS[k][name] for name in names) for k in kept}
        assert met == {tuple(cell[name] for name in names) for cell in CELLS}
    assert fewest <= len(kept) <= most
    assert kept == covering(CELLS, sets)


def test_cells_that_are_not_a_full_product_are_covered_too():
    some = [cell for cell in CELLS if sum(cell.values()) % 3]
    met = {(some[k]["a"], some[k]["b"]) for k in covering(some, [["a", "b"]])}
    assert met == {(cell["a"], cell["b"]) for cell in some}


@pytest.mark.thin("a", "b")
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(4))
def test_cells_that_are_left_out_are_slow(a, b, request):
    cells = [item for item in request.session.items if item.function is request.function]
    slow = [item for item in cells if item.get_closest_marker("slow")]
    assert len(cells) - len(slow) <= 6
