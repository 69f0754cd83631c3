"""What a client of a server's OpenAI API gets for a `prediction`: the same answer, in fewer steps; and how many of its
tokens were right."""

from itertools import count

import pytest

from bench.lib.servers import MODEL_NAME
from tests.support.prompts import SHORT

TOKENS = 40
WRONG = (
    "text", 1, {}, {"type": "content"}, {"type": "text", "content": "x"}, {"type": "content", "content": 3},
    {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1"}}]},
    {"type": "content", "content": "x" * 300_000},
)  # fmt: skip
SALTS = count()


def ask(client, kind, *, stream=False, prompt: str | list[str] = SHORT[5], **more):
    """The text of each choice, and the usage."""
    asked = {"model": MODEL_NAME, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
    asked |= {"stream_options": {"include_usage": True}} if stream else {}
    extra = {"ignore_eos": True, "cache_salt": f"predictions {next(SALTS)}"} | more  # nothing learnt is of use
    if kind == "chat":
        said = client.chat.completions.create(
            messages=[{"role": "user", "content": SHORT[5]}], **asked, extra_body=extra
        )
    else:
        said = client.completions.create(prompt=prompt, **asked, extra_body=extra)
    texts, usage = {}, None
    for chunk in said if stream else [said]:
        for choice in chunk.choices:
            each = choice.model_dump()
            text = each["text"] if kind == "text" else each["delta" if stream else "message"]["content"]
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
        usage = chunk.usage or usage
    return list(texts.values()), usage.model_dump()


def check_predictions(client, accepted):
    """client: of OpenAI's library; accepted: returns how many draft tokens have been accepted."""
    from openai import BadRequestError

    def brought(*given, **more):
        before = accepted()
        return *ask(client, *given, **more), accepted() - before

    for kind in ("chat", "text"):
        (text,), usage, alone = brought(kind)
        assert "accepted_prediction_tokens" not in (usage["completion_tokens_details"] or {})
        parts = [{"type": "text", "text": part} for part in (text[:20], text[20:])]
        changed = f"Sure: {text[:60]} or {text[70:]}"
        for content, stream, least in (
            (text, False, 30),
            (parts, True, 30),
            (changed, True, 12),
            ("no " * 99, False, 0),
        ):
            given = {"type": "content", "content": content}
            texts, usage, count = brought(kind, stream=stream, prediction=given)
            details = usage["completion_tokens_details"]
            right, wrong = (details[f"{name}_prediction_tokens"] for name in ("accepted", "rejected"))
            assert texts == [text] and usage["completion_tokens"] == TOKENS
            assert count >= max(least, alone - 3) and right >= least and (wrong > 90 or least > 0)
            assert right + wrong > 30 and (wrong <= 2 or content in (changed, "no " * 99))
    given = {"type": "content", "content": text}
    texts, usage, count = brought("text", prompt=2 * [SHORT[5]], prediction=given)
    assert texts == [text] * 2 and usage["completion_tokens_details"]["accepted_prediction_tokens"] > 60 < count
    for given in WRONG:
        with pytest.raises(BadRequestError, match="prediction"):
            ask(client, "chat", prediction=given)
