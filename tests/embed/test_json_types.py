"""Types of JSON columns: every value can be stored in the type that all values have in common."""

from typing import Any

import msgspec
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli.embed.outputs import JsonColumns, common, is_plain, shape_of

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


def lines_of(rows: list[dict[str, Any]]) -> Any:
    return pa.record_batch(
        [pa.array([msgspec.json.encode(row) for row in rows], pa.binary())], names=["line"]
    )


def restored(found: Any, before: Any) -> bool:
    """Return whether a stored value holds the one before: itself, absent fields as nulls, or its JSON."""
    if isinstance(found, str) and found != before:
        return bool(msgspec.json.decode(found) == before)
    if isinstance(before, dict) and isinstance(found, dict):
        names = before.keys() | found.keys()
        return all(restored(found.get(name), before.get(name)) for name in names)
    if isinstance(before, list) and isinstance(found, list):
        return len(before) == len(found) and all(map(restored, found, before))
    return bool(found == before)


@given(st.lists(st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=3), min_size=1, max_size=6))
def test_every_value_is_stored(rows: list[dict[str, Any]]) -> None:
    rows = [{"text": "every row has one"} | row for row in rows]
    batch = lines_of(rows)
    columns = JsonColumns([batch])
    found = columns.batch(batch.column(0)).to_pylist()
    assert len(rows) == len(found)
    for before, after in zip(rows, found, strict=True):
        assert all(restored(after[name], before.get(name)) for name in after)
        assert before.keys() <= after.keys()


@given(VALUES, VALUES, VALUES)
def test_the_order_of_values_does_not_matter(first: Any, second: Any, third: Any) -> None:
    a, b, c = shape_of([first]), shape_of([second]), shape_of([third])
    assert common(a, b) == common(b, a)
    assert common(common(a, b), c) == common(a, common(b, c))
    assert common(a, a) == a
    assert common(common(a, b), c) == shape_of([first, second, third])


def test_shapes_of_values() -> None:
    assert shape_of([[1, 2.5, None]]) == ["float"]
    assert shape_of([{"a": [True]}]) == {"a": ["bool"]}
    assert common("large", "float") == "json"
    assert common("int", "large") == "large"
    assert common(shape_of([[]]), shape_of([["x"]])) == ["string"]
    assert not is_plain(shape_of([{"a": {}}]))
    assert is_plain(shape_of([{"a": [{"b": None}]}]))
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    assert not is_plain(shape_of([deep]))
    assert shape_of([{str(number): 1 for number in range(1001)}]) == "json"
