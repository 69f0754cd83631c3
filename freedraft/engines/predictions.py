"""`prediction` of OpenAI's API: a text that the client expects the answer to repeat, from which its request is drafted
for, and no other."""

import asyncio
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Any, Self

FIELD = "prediction"
MOST = 1 << 18  # characters
_AGAIN = 5  # tokens in a row by which a place in the prediction is found again


def text_of(given: Any) -> str:
    """The text of a request's field. Raises ValueError: it is not as OpenAI's API has it, or too long."""
    content = _of(given, "content", "content")
    parts = [_of(part, "text", "text") for part in content] if isinstance(content, list) else [content]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise ValueError(f'\'{FIELD}\' must be {{"type": "content", "content": a string, or parts of type "text"}}')
    if (size := sum(map(len, texts))) > MOST:
        raise ValueError(f"'{FIELD}' must have at most {MOST:,} characters, not {size:,}")
    return "".join(texts)


def _of(given: Any, kind: str, key: str) -> Any:
    return given.get(key) if isinstance(given, dict) and given.get("type") == kind else None


def kept(predicted: Sequence[int], answers: Iterable[Sequence[int]]) -> int:
    """How many of the predicted tokens stand in each answer, in this order; after a change, from five in a row on."""
    places = defaultdict[tuple[int, ...], list[int]](list)
    for i in range(len(predicted) - _AGAIN + 1):
        places[tuple(predicted[i : i + _AGAIN])].append(i)
    count = 0
    for answer in answers:
        at = i = 0
        while i < len(answer) and at < len(predicted):
            if predicted[at] != answer[i]:
                found = places.get(tuple(answer[i : i + _AGAIN]), [])
                if (following := bisect_left(found, at)) == len(found):
                    i += 1
                    continue
                at = found[following]
            count, at, i = count + 1, at + 1, i + 1
    return count


class Prediction:
    """The tokens of one request's prediction, and how many of them its answers have; text is read in a thread."""

    def __init__(self, tokenizer: Any, executor: Executor | None) -> None:
        self.tokens: list[int] = []
        self._tokenizer, self._executor = tokenizer, executor

    @classmethod
    async def read(cls, given: Any, tokenizer: Any, executor: Executor | None = None) -> Self:
        """That of a request's field; executor: the loop's own by default. Raises ValueError: see `text_of`."""
        made, text = cls(tokenizer, executor), text_of(given)
        made.tokens = await made._in_thread(made._encode, text)
        return made

    async def _in_thread(self, function: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *given)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    async def usage(self, usage: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
        """A response's usage with the numbers of OpenAI's API. texts: of its choices."""
        accepted = await self._in_thread(lambda: kept(self.tokens, map(self._encode, texts)))
        counted = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": len(texts) * len(self.tokens) - accepted,
        }
        return usage | {"completion_tokens_details": (usage.get("completion_tokens_details") or {}) | counted}

    async def of_response(self, response: dict[str, Any]) -> dict[str, Any]:
        """The usage of a whole response."""
        return await self.usage(response["usage"], list(_texts(response, "message").values()))

    async def of_stream(self, events: AsyncGenerator[str]) -> AsyncIterator[str]:
        """Server-sent events, of which the last has usage if the client has asked for it."""
        texts = defaultdict[int, str](str)

        async def counted(line: str) -> str:
            if not line.startswith("data: {"):
                return line
            chunk = json.loads(line.removeprefix("data: "))
            for index, text in _texts(chunk, "delta").items():
                texts[index] += text
            if not chunk.get("usage") or chunk.get("choices"):
                return line
            chunk["usage"] = await self.usage(chunk["usage"], list(texts.values()))
            return f"data: {json.dumps(chunk, ensure_ascii=False)}"

        async with aclosing(events) as given:
            async for some in given:
                yield "\n".join([await counted(line) for line in some.split("\n")])


def _texts(response: dict[str, Any], message: str) -> dict[int, str]:
    """The text of each choice; message: where a chat's is."""
    choices = response.get("choices") or []
    return {one["index"]: (one.get(message) or {}).get("content") or one.get("text") or "" for one in choices}
