"""Messages of servers about a field, which are passed on, and all others, which may quote an input."""

import pytest

from backends.http.openai_wire import REFUSED_INPUT, ErrorDetail, refused_input


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "`dimensions` must be between 1 and 384, not 5000",
            "`dimensions` must be between 1 and 384, not 5000",
        ),
        ("dimensions must be at most 1024.", "`dimensions` must be at most 1024"),
        ("`dimensions` must be between 1 and 384, not my secret text", REFUSED_INPUT),
        ("my secret text: `dimensions` must be at least 1", REFUSED_INPUT),
        ("`dimensions` must be at least 1\nmy secret text", REFUSED_INPUT),
        ("the text 'my secret' is not allowed", REFUSED_INPUT),
        ("", REFUSED_INPUT),
    ],
)
def test_only_the_range_of_a_field_is_passed_on(message: str, shown: str) -> None:
    error = refused_input(ErrorDetail(message, "invalid_request_error"))

    assert shown == error.message
