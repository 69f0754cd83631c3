"""Prompts of the demo: four kinds of work, three prompts each, written for it."""

from __future__ import annotations

LETTER = """\
Dear neighbours, the comittee has decided to hold the yearly street party on Saturday the 14th of June. We
will close the road between the bakery and the church from noon untill midnight, so please move your cars
before eleven in the morning. The bakery has kindly offered to provide bread and cakes, and the Rossi family
will bring their big grill again. Everyone is asked to bring a salad, a desert or something to drink. There
will be games for the childern in the afternoon, and a small band will play from seven o'clock. If it rains,
we will meet in the parish hall instead. Please tell Marta at number 12 by the end of May how many of you are
coming, and wether you can help to set up the tables. Last year we were more than ninety people, and it was a
wonderfull evening. We are looking forward to seeing all of you."""

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

WORD_COUNT = """\
def count_words(path):
    counts = {}
    with open(path) as file:
        for line in file:
            for word in line.split():
                word = word.strip(".,;:!?").lower()
                if word:
                    counts[word] = counts.get(word, 0) + 1
    return counts
"""

PROMPTS: dict[str, tuple[str, ...]] = {
    "copying": (
        f"Correct the spelling mistakes in this letter. Return the whole letter and change nothing else.\n\n{LETTER}",
        f"Repeat the following text word for word, with 'the board' replaced by 'the council'.\n\n{MINUTES}",
        f"Return the following recipe exactly as it is, but write 'onions' instead of 'potatoes'.\n\n{RECIPE}",
    ),
    "code": (
        f"Rename the attribute `balance` to `funds` in this Python file; return all of it.\n\n```python\n{ACCOUNT}```",
        "Write a Python class `Stack` on top of a list, with the methods push, pop, peek, is_empty and size, a "
        "docstring for each method, and a short example of its use.",
        "Add type hints and a docstring to this Python function, then write three unit tests for it with the "
        f"unittest module.\n\n```python\n{WORD_COUNT}```",
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

WARM_UP = "Write one sentence about the sea, then write the same sentence again."
