# SPDX-License-Identifier: Apache-2.0
"""Prompts that ask for the body of a small Python function, in the style of HumanEval, written for this project.

A task combines what is collected with a condition. Conditions are split between training, choosing settings and the
final test, so that no tested condition was trained on.
"""

from itertools import product


NUMBER_TASKS = (
    ("sum_of", "Return the sum of the numbers in `numbers` that are {}.", "int"),
    ("product_of", "Return the product of the numbers in `numbers` that are {}, or 1 if there are none.", "int"),
    ("largest", "Return the largest number in `numbers` that is {}, or None if there is none.", "Optional[int]"),
    ("smallest", "Return the smallest number in `numbers` that is {}, or None if there is none.", "Optional[int]"),
    ("count", "Return how many numbers in `numbers` are {}.", "int"),
    ("squares_of", "Return the squares of the numbers in `numbers` that are {}, in order.", "List[int]"),
    ("sorted", "Return the numbers in `numbers` that are {}, in ascending order.", "List[int]"),
    ("without", "Return `numbers` without the numbers that are {}.", "List[int]"),
    ("index_of_first", "Return the index of the first number in `numbers` that is {}, or -1.", "int"),
    ("all", "Return True if all numbers in `numbers` are {}, and False otherwise.", "bool"),
)
NUMBER_CONDITIONS = (
    ("even", "even"),
    ("odd", "odd"),
    ("positive", "greater than zero"),
    ("negative", "less than zero"),
    ("multiple_of_three", "divisible by 3"),
    ("two_digit", "two-digit numbers"),
    ("above_average", "above the average of the list"),
    ("prime", "prime"),
    ("square", "perfect squares"),
    ("single_digit", "between 0 and 9"),
    ("ending_in_five", "numbers whose last digit is 5"),
    ("repeated", "in the list more than once"),
)
WORD_TASKS = (
    ("count", "Return how many words in `words` {}.", "int"),
    ("select", "Return the words in `words` that {}, in order.", "List[str]"),
    ("remove", "Return `words` without the words that {}.", "List[str]"),
    ("longest", "Return the longest word in `words` among those that {}, or an empty string.", "str"),
    ("join", "Return one string of all words in `words` that {}, separated by commas.", "str"),
    ("upper", "Return the words in `words` that {}, in upper case.", "List[str]"),
    ("lengths_of", "Return a dict from each word in `words` to its length, for words that {}.", "Dict[str, int]"),
    ("first", "Return the first word in `words` for which it is true that they {}, or None.", "Optional[str]"),
    ("any", "Return True if there are any words in `words` that {}.", "bool"),
)
WORD_CONDITIONS = (
    ("starting_with_a_vowel", "start with a vowel"),
    ("ending_with_s", "end with the letter s"),
    ("longer_than_four", "are longer than four letters"),
    ("with_a_digit", "contain a digit"),
    ("in_upper_case", "are in upper case"),
    ("with_double_letters", "contain the same letter twice in a row"),
    ("capitalized", "start with a capital letter"),
    ("palindromes", "read the same backwards"),
    ("short", "have at most three letters"),
    ("with_a_hyphen", "contain a hyphen"),
    ("of_even_length", "have an even number of letters"),
    ("starting_and_ending_alike", "start and end with the same letter"),
)
# Of each twelve conditions: the first eight to train on, two to choose settings by, two to test on.
SPLITS = {"train": slice(0, 8), "validation": slice(8, 10), "test": slice(10, 12)}


def code_prompts(split: str) -> list[str]:
    """The prompts of one of `SPLITS`.

    Args:
        split: "train" (152 prompts), "validation" or "test" (38 each).
    """
    kinds = (
        (NUMBER_TASKS, NUMBER_CONDITIONS, "numbers: List[int]"),
        (WORD_TASKS, WORD_CONDITIONS, "words: List[str]"),
    )
    return [
        _prompt(f"{name}_{condition}", argument, text.format(words), returned)
        for tasks, conditions, argument in kinds
        for (name, text, returned), (condition, words) in product(tasks, conditions[SPLITS[split]])
    ]


def _prompt(name: str, argument: str, text: str, returned: str) -> str:
    return (
        "Complete this Python function.\n\n```python\nfrom typing import Dict, List, Optional\n\n\n"
        f'def {name}({argument}) -> {returned}:\n    """{text}"""\n```'
    )
