"""What logits are recycled of, noted on their way to the drafter."""

from __future__ import annotations

from typing import Any


def recorded(guarded: Any, said: dict[tuple[int, ...], set[int]]) -> None:
    """Note the likeliest token behind each text that logits are recycled of."""
    drafter, original = guarded.method.drafter, guarded.recycle

    def recycle(logits: Any) -> None:
        request_ids, draft, top_tokens, _, contexts = logits
        for b, request_id in enumerate(request_ids):
            if not request_id:  # it has begun anew: see `LogitsCopy.forget`
                continue
            text = drafter.tokens(request_id).tolist()
            if contexts is not None:
                if len(text) < contexts[b]:  # it has ended meanwhile
                    continue
                text = text[: contexts[b]]
            assert text[-1] == draft.tokens[b, 0]
            paths = [text]
            for i in range(draft.counts[b]):
                if i:
                    paths.append([*paths[draft.parents[b, i]], int(draft.tokens[b, i])])
                said.setdefault(tuple(paths[i]), set()).add(int(top_tokens[b, i, 0]))
        original(logits)

    guarded.recycle = recycle
