"""How users' turns may begin when the target writes them: without any it dwells on what it likes best.

Left alone, a small model writes requests for essays and explanations. An opening leads it to another kind of task; the
rest of the turn, and everything that is asked there, it writes itself.
"""

from __future__ import annotations

import random

_QUESTIONS = (
    "Why ", "How does ", "How do I ", "What is ", "What are ", "Who was ", "Who wrote ", "When did ", "Where is ",
    "Which ", "Can you tell me ", "Is it true that ", "What happens if ", "What is the difference between ",
)  # fmt: skip
_SUMS = (
    "A farmer has ", "A train leaves ", "There are ", "If a shop sells ", "Tom has ", "Maria buys ", "A class of ",
    "Solve this problem step by step: ", "What is the value of ", "How many ", "Find the ", "A recipe needs ",
    "A number is ", "The sum of ",
)  # fmt: skip
_CODE = (
    "Write a Python function that ", "Complete this function.\n\ndef ", "def ", "Write a program that ",
    "What does this code do?\n\n```python\n", "Write a SQL query that ", "Fix the bug in this code:\n\n",
    "Implement a class ", "Write a regular expression that ", "Write a bash command that ",
)  # fmt: skip
_TEXTS = (
    "Translate this sentence into English: ", "Translate into German: ", "Translate to French: ",
    "Translate from Spanish to English: ", "Correct the grammar of this sentence: ", "Rewrite this more politely: ",
    "Summarize this text in one sentence: ", "Extract the names and dates from this text: ",
    "Turn these notes into a list: ", "Write a short story about ", "Write a poem about ", "Write an email to ",
    "Compose a blog post about ", "Imagine you are ", "You are a ", "Give me a list of ", "Compare ",
    "Give three reasons ", "Explain to a child ", "Describe ", "Suggest ", "Classify these items: ", "Make a plan for ",
)  # fmt: skip
_KINDS = (_QUESTIONS, _SUMS, _CODE, _TEXTS)

_BACK = (
    "Summarize that ", "Rewrite your answer ", "Explain the second ", "Now ", "Translate that ", "What about ",
    "Why ", "Give an example ", "Make it shorter", "Continue from there", "Can you ",
)  # fmt: skip

_QUOTING = (
    "Answer the question with the help of this text.\n\n{text}\n\nQuestion: ",
    "{text}\n\nRead the text above. ",
    "Context:\n{text}\n\nUse the context to answer: ",
    "Here is a passage:\n\n{text}\n\n",
)


def first_opening(rng: random.Random) -> str:
    """How a conversation may begin; every kind of task is as likely as the others."""
    return rng.choice(rng.choice(_KINDS))


def later_opening(rng: random.Random) -> str:
    """How a user may go on: looking back at what was said."""
    return rng.choice(_BACK)


def quoting_opening(rng: random.Random, text: str) -> str:
    """A turn that gives a text to read; what is asked of it is still to be written."""
    return rng.choice(_QUOTING).replace("{text}", text)
