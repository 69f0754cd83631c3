"""Repetitions in the request's own text: long matches, and alignments after an edit.

A match is an earlier position with the same last tokens, at least four, as a node. An alignment is one that would match
but for an edit: the text was a copy until a few tokens ago, and probably continues as one. Both are looked up at the
root and extended along drafted paths, where each token must be the one that followed before.
"""

from __future__ import annotations

import numpy as np

from freedraft.compiled import lean
from sssd_plugin.request_index import GRAM, newest_gram, older_gram

MAX_MATCHES = 64
MAX_MATCH = 64  # largest compared length of a match
MAX_WALK = 256  # 4-gram positions visited for the longest match

MIN_RUN = 8  # least copied tokens before an edit
MAX_EDIT = 8  # most tokens since the copy broke off, or dropped by a deletion
MAX_ALIGNMENTS = 4
EVIDENCE = 32  # tokens before the copy that show whether it started after an edit, too
REPLACED, INSERTED, DELETED = range(3)

POSITION, LENGTH = range(2)  # of a match
SINCE, EDIT = range(1, 3)  # of an alignment: tokens equal since the edit, and REPLACED, INSERTED or DELETED


@lean
def _length(tokens, i, end, match):
    """Return the number of equal tokens up to positions i and `end`, of which `match` are known to be equal."""
    while match < MAX_MATCH and i >= match and tokens[i - match] == tokens[end - match]:
        match += 1
    return match


@lean
def _newest(request, end, before):
    """Return the newest position below `before` with the same last four tokens as position `end`, -1 for none."""
    tokens = request.tokens
    return newest_gram(request, before, tokens[end - 3], tokens[end - 2], tokens[end - 1], tokens[end])


@lean
def _walk(request, end, back, best, length):
    """Look for longer matches of the tokens up to position `end`, at the positions of the 4-gram that ends `back`
    before it. Returns position (-1 for none) and length of the newest longest match, initially `best` and `length`, and
    whether all positions were visited."""
    tokens = request.tokens
    i, walked = _newest(request, end - back, end - back), 0
    while i >= 0 and length < MAX_MATCH:
        if walked == MAX_WALK:
            return best, length, False
        walked += 1
        # Not longer if it differs at the start of the longest match.
        if length < GRAM or (i + back >= length and tokens[i + back - length] == tokens[end - length]):
            match = _length(tokens, i + back, end, 0)
            if match > length:
                best, length = i + back, match
        i = older_gram(request, i)
    return best, length, True


@lean
def _longest(request, end):
    """Return position and length of the newest longest match of the tokens up to `end`; -1 and 0 for none. If the last
    four tokens are too common to visit all their positions, an earlier 4-gram is tried."""
    best, length, complete = _walk(request, end, 0, np.int64(-1), 0)
    back = 2
    while not complete and back < MAX_MATCH and end - back >= GRAM - 1:
        best, length, complete = _walk(request, end, back, best, length)
        back *= 2
    return best, length


@lean
def match_root(request, matches):
    """Write the root's matches, newest first: the newest ones, the last one replaced by a longer older match.

    `matches`, int32 [1 + MAX_MATCHES, 2], gets their number, then positions and lengths. Returns the longest length.
    """
    end, n, longest = len(request.tokens) - 1, 0, 0
    if end >= GRAM - 1:
        i = _newest(request, end, end)
        while i >= 0 and n < MAX_MATCHES:
            n += 1
            matches[n, POSITION], matches[n, LENGTH] = i, _length(request.tokens, i, end, GRAM)
            longest = max(longest, matches[n, LENGTH])
            i = older_gram(request, i)
        if i >= 0 and longest < MAX_MATCH:
            older, length = _longest(request, end)
            if length > longest:
                longest = length
                matches[n, POSITION], matches[n, LENGTH] = older, length
    matches[0, 0] = n
    return longest


@lean
def match_child(request, above, matches, context):
    """Write the matches of a node below the root: its parent's (`above`) that continue with its token, else new ones;
    context: int32 [>= GRAM], the last tokens at the node, newest first."""
    tokens = request.tokens
    end, n = len(tokens) - 1, 0
    for m in range(1, 1 + above[0, 0]):
        i = above[m, POSITION] + 1
        if i < end and tokens[i] == context[0]:
            n += 1
            matches[n, POSITION], matches[n, LENGTH] = i, min(above[m, LENGTH] + 1, MAX_MATCH)
    if n == 0:
        i = newest_gram(request, end, context[3], context[2], context[1], context[0])
        while i >= 0 and n < MAX_MATCHES:
            n += 1
            matches[n, POSITION], matches[n, LENGTH] = i, GRAM
            i = older_gram(request, i)
    matches[0, 0] = n


@lean
def _evidence(tokens, source, end):
    """Return the number of tokens up to position `end` that equal those up to `source`, or up to a position next to
    it."""
    most = 0
    for place in range(source - 2, source + 3):
        equal = 0
        for back in range(min(EVIDENCE, place + 1, end + 1)):
            equal += tokens[place - back] == tokens[end - back]
        most = max(most, equal)
    return most


@lean
def align_root(request, longest, alignments):
    """Write the root's alignments, int32 [1 + MAX_ALIGNMENTS, 3]: their number, then positions, tokens equal since,
    kinds; return the number of tokens copied before the edit, 0 for none, and of equal ones among the 32 before the
    start of the copy. If the longest match is a copy itself, nothing is aligned."""
    tokens = request.tokens
    end, n, run, evidence = len(tokens) - 1, 0, 0, 0
    if longest < MIN_RUN:
        for gap in range(1, MAX_EDIT + 1):
            if end - gap < GRAM - 1:
                break
            source, run = _longest(request, end - gap)
            if run < MIN_RUN:
                run = 0
                continue
            evidence = _evidence(tokens, source - run - 1, end - gap - run - 1)
            # The copy broke off `gap` tokens ago, after `source`; which of the following tokens was the last one?
            for shift in range(max(-gap, -2), MAX_EDIT + 1):
                i = source + gap + shift
                if i >= end or n >= MAX_ALIGNMENTS:
                    break
                since = 0
                while since < gap and since < gap + shift and tokens[i - since] == tokens[end - since]:
                    since += 1
                if since == 0 and shift != 0 and shift != -1:
                    continue
                n += 1
                alignments[n, POSITION], alignments[n, SINCE] = i, since
                alignments[n, EDIT] = REPLACED if shift == 0 else INSERTED if shift < 0 else DELETED
            break
    alignments[0, 0] = n
    return run, evidence


@lean
def align_child(request, above, alignments, token):
    """Write the alignments of a node below the root: its parent's that continue with its token."""
    tokens, n = request.tokens, 0
    for m in range(1, 1 + above[0, 0]):
        i = above[m, POSITION] + 1
        if i < len(tokens) - 1 and tokens[i] == token:
            n += 1
            alignments[n, POSITION], alignments[n, SINCE] = i, above[m, SINCE] + 1
            alignments[n, EDIT] = above[m, EDIT]
    alignments[0, 0] = n
