"""Prompts of the demo: four kinds of work, three prompts each, written for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

NOTICE = """\
Our buletin for the month of May. The libary will be closed on Monday becuase of the holiday. From Tuesday on it
is open from nine to six again. The new books for childern have arived, and Mrs. Keller will read from them on
Friday afternoon. Plese return all borrowed books befor the summer. The reading circle meets on the last Wensday
of the month at seven in the evening."""

MINUTES = """\
The meeting of the water board took place on Tuesday in the old town hall. The chairwoman opened the meeting
at nine and welcomed the new members. The engineer reported that the northern reservoir is at sixty percent of
its capacity, which is ten percent less than in the same month of last year. The pump at the eastern station
was repaired in March and has run without a fault since then. The treasurer reported that the repair cost less
than planned, and proposed to spend the rest on new meters for the schools. The board agreed to the proposal
without a vote. A resident of the hill district asked why the pressure is so low in the evening. The engineer
explained that the pipe to the hill district is narrow and old, and that a new one is planned for the next
year. The meeting closed at half past eleven."""

RECIPE = """\
Peel the potatoes and cut them into thin slices. Rub a wide baking dish with a cut clove of garlic and butter
it well. Lay the slices into the dish like tiles on a roof, and salt every layer lightly. Warm the milk and
the cream in a small pan with a little nutmeg and pepper, and pour them over the potatoes until the slices are
just covered. Scatter the grated cheese on top and set a few pieces of butter on the cheese. Bake the dish in
the middle of the oven at one hundred and eighty degrees for about one hour, until the top is brown and a
knife goes through the potatoes without effort. Let it rest for ten minutes before you serve it with a green
salad."""

ACCOUNT = '''\
class Account:
    """A bank account with a history of its transactions."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money in the account")
        self.balance -= amount
        self.history.append(("withdraw", amount))
'''

# A model of 135 M parameters follows simple instructions only; in each of these it does what is asked, more or less.
PROMPTS: dict[str, tuple[str, ...]] = {
    "copying": (
        f"Please proofread this text and return the corrected text.\n\n{NOTICE}",
        f"Write the minutes again in the present tense.\n\n{MINUTES}",
        f"Make a numbered list of the steps of this recipe.\n\n{RECIPE}",
    ),
    "code": (
        f"Add a docstring to every method of this class.\n\n```python\n{ACCOUNT}```",
        "Write a Python class `Stack` on top of a list, with the methods push, pop, peek, is_empty and size, a "
        "docstring for each method, and a short example of its use.",
        "Write a Python function that reads a CSV file and returns the average of each numeric column.",
    ),
    "chat": (
        "What are the differences between a virus and a bacterium, and why do antibiotics work against one of them?",
        "I have a job interview on Thursday and I am nervous. How should I prepare for it in three days?",
        "Explain how a refrigerator works to somebody who has never studied physics.",
    ),
    "story": (
        "Write a short story about a lighthouse keeper who finds a letter in a bottle on a winter morning.",
        "Tell me a story about a young fox who wants to learn how to play the violin.",
        "Write the first page of a detective novel that begins in a library during a thunderstorm.",
    ),
}

BY_KIND = [prompt for prompts in PROMPTS.values() for prompt in prompts]

WARM_UP = "Write one sentence about the sea, then write the same sentence again."


def chats(model: Path, texts: Sequence[str], *, tokenize: bool = True) -> list[Any]:
    """Each text as a chat of one turn in the model's template: token ids, or text without `tokenize`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=tokenize, add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]
