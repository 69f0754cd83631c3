"""Draft length policies, which decide after every position of a round of draft passes."""
