"""Which pages of a request's KV cache a windowed draft pass reads."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freedraft.draft_model import Window


def read_by(window: Window, root: int, page: int, attended: int | None, longest: int) -> list[int]:
    """Pages that the last of `longest` passes reads, one after another: token by token, as a reader would say it."""
    last = root + longest - 1
    sinks = 0 if attended is not None and root + longest > attended else window.sinks
    pages = []
    for at in range(last + 1):
        is_sink = at // page < -(-sinks // page)
        is_new = at // page >= (root + 1 - window.newest) // page
        if (is_sink or is_new) and at // page not in pages:
            pages.append(at // page)
    return pages


@given(
    sinks=st.integers(0, 70),
    newest=st.integers(1, 200),
    root=st.integers(0, 500),
    page=st.sampled_from([1, 3, 16, 32, 128]),
    attended=st.none() | st.integers(1, 600),
    longest=st.integers(1, 20),
)
def test_pages_are_those_that_a_reader_would_name(
    sinks: int, newest: int, root: int, page: int, attended: int | None, longest: int
) -> None:
    window = Window(sinks, newest)
    s, d = window.pages(np.array([root], np.int64), page, attended=attended, max_draft_len=longest)
    used = (root + longest - 1) // page + 1 - int(d[0])
    made = [i if i < s[0] else i + int(d[0]) for i in range(used)]
    assert made == read_by(window, root, page, attended, longest)
    # The root is read, and the tokens that are left out lie before its window.
    assert root // page in made and root + 1 - int(d[0]) * page > 0
    if d[0]:
        assert (s[0] + d[0]) * page <= root + 1 - newest
