"""Criteo's layout: a label, 13 whole numbers and 26 hashed categories a line, tab-separated, without a header."""

from __future__ import annotations

from .table_schema import Ids, Numbers, Split, TableSchema

_NUMBERS = [f"I{i}" for i in range(1, 14)]
_CATEGORIES = [f"C{i}" for i in range(1, 27)]
#: The Kaggle set spans seven days in order: the last is held out, as is usual.
_HELD_OUT = 1 / 7
#: Buckets of each category unless the source asks for others.
BUCKETS = 20_000


def criteo_schema(buckets: int = BUCKETS) -> TableSchema:
    """Return the schema of Criteo's files (Kaggle display advertising, and the days of the terabyte set).

    Args:
        buckets: values that each category is hashed to, one of them for missing ones.
    """
    return TableSchema(
        table="criteo",
        delimiter="\t",
        header=False,
        columns=["label", *_NUMBERS, *_CATEGORIES],
        labels=["label"],
        categorical={name: Ids(rows=buckets, hexadecimal=True) for name in _CATEGORIES},
        numeric={name: Numbers(log=True) for name in _NUMBERS},
        split=Split(last=_HELD_OUT),
    )
