"""Values that no argument is meant to take, of every form that callers have handed in by mistake; by name."""

from __future__ import annotations

import warnings
from array import array
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Hostile:
    """An object of which every question raises."""

    def __repr__(self) -> str:
        raise RuntimeError("it has no repr")

    def __index__(self) -> int:
        raise RuntimeError("it is no number")

    __int__ = __index__

    def __float__(self) -> float:
        raise RuntimeError("it is no number")

    def __len__(self) -> int:
        raise RuntimeError("it has no length")

    def __bool__(self) -> bool:
        raise RuntimeError("it is neither true nor false")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("it equals nothing")

    __hash__ = object.__hash__

    def __iter__(self) -> Any:
        raise RuntimeError("it has no members")

    def __array__(self, *of: Any, **how: Any) -> Any:
        raise RuntimeError("it is no array")


class Wrong:
    """An object with methods that return the wrong types."""

    def __index__(self) -> Any:
        return "1"

    def __float__(self) -> Any:
        return "1"

    def __array__(self, *of: Any, **how: Any) -> Any:
        return [1, 2]


class Text(str):
    """A str that is not one alone."""


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a view with torch's negative bit set."""
    return torch._neg_view(torch.neg(tensor))


def endless() -> list[Any]:
    """A list that holds itself."""
    members: list[Any] = []
    members.append(members)
    return members


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that some of these kinds may change
    BAD_VALUES: dict[str, Any] = {
        "None": None,
        "True": True,
        "a negative int": -1,
        "a huge int": 2**64,
        "an int of 5,000 digits": 10**5000,
        "a fraction": 1.5,
        "nan": float("nan"),
        "inf": float("inf"),
        "minus inf": float("-inf"),
        "a complex number": 1 + 2j,
        "a Decimal": Decimal("NaN"),
        "a Fraction": Fraction(1, 3),
        "an empty str": "",
        "a str": "1",
        "a nul": "\0",
        "an escape": "\x1b[31m",
        "half a character": "\ud800",
        "a long str": "x" * 5000,
        "a Text": Text("1"),
        "bytes": b"1",
        "a bytearray": bytearray(b"12"),
        "a memoryview": memoryview(b"12"),
        "an empty list": [],
        "a list of one": [1],
        "a list of str": ["1"],
        "a list of None": [None],
        "a list of lists": [[1, 2], [3, 4]],
        "a ragged list": [[1], 2],
        "a list of half a character": ["\ud800"],
        "an endless list": endless(),
        "a tuple": (1, 2),
        "a tuple of fractions": (1.5, 2.5),
        "a dict": {"a": 1},
        "a set": {1, 2},
        "an iterator": iter([1, 2]),
        "an empty range": range(0),
        "a slice": slice(1, 2),
        "an array": array("i", [1, -2]),
        "an array of doubles": array("d", [1.5]),
        "a type": int,
        "a function": len,
        "an object": object(),
        "a path": Path("x"),
        "an exception": ValueError("x"),
        "a hostile object": Hostile(),
        "a wrong object": Wrong(),
        "a numpy bool": np.True_,
        "a numpy fraction": np.float32(1.5),
        "a numpy nan": np.float64("nan"),
        "a numpy date": np.datetime64("2020-01-01"),
        "a numpy void": np.zeros(1, [("a", "i4")])[0],
        "two numbers": np.array([1, 2]),
        "two fractions": np.array([1.5, 2.5]),
        "two negative numbers": np.array([-1, -2]),
        "no numbers": np.array([]),
        "an array of no dimension": np.array(1.5),
        "a matrix": np.ones((2, 2), np.int64),
        "an array of objects": np.array([1, "a", None], object),
        "an array of str": np.array(["a", "b"]),
        "an array of records": np.zeros(2, [("a", "i4")]),
        "an array in the other byte order": np.array([1, 2], ">i4"),
        "a masked array": np.ma.masked_array([1, 2], [True, False]),
        "dates": np.array(["2020-01-01"], "M8[D]"),
        "a tensor of one": torch.tensor(1.5),
        "a tensor of two": torch.tensor([1.5, 2.5]),
        "a tensor of bools": torch.tensor([True, False]),
        "a tensor of none": torch.tensor([]),
        "a tensor of many dimensions": torch.ones(1, 2, 1, 2),
        "a tensor with a gradient": torch.tensor([1.5, 2.5], requires_grad=True),
        "a complex tensor": torch.tensor([1 + 2j, 3 + 4j]),
        "a conjugate tensor": torch.tensor([1 + 2j, 3 + 4j]).conj(),
        "a negative view": negated(torch.tensor([-1, -2])),
        "a negative view of fractions": torch.tensor([1 + 2j, 3 + 4j]).conj().imag,
        "a negative number as a view": negated(torch.tensor(2)),
        "a meta tensor": torch.tensor([1, 2], device="meta"),
        "a meta number": torch.tensor(1, device="meta"),
        "a meta fraction": torch.tensor(1.5, device="meta"),
        "a sparse tensor": torch.tensor([1, 0, 2]).to_sparse(),
        "a sparse number": torch.sparse_coo_tensor(torch.empty(0, 1, dtype=torch.int64), torch.tensor([1]), ()),
        "a sparse matrix": torch.tensor([[1, 0, 2]]).to_sparse_csr(),
        "a quantized tensor": torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.1, 0, torch.quint8),
        "a quantized number": torch.quantize_per_tensor(torch.tensor(1.0), 0.1, 0, torch.qint32),
        "a nested tensor": torch.nested.nested_tensor([torch.tensor([1, 2])]),
        "a jagged tensor": torch.nested.nested_tensor([torch.tensor([1, 2])], layout=torch.jagged),
        "bits": torch.empty(2, dtype=torch.uint8).view(torch.bits8),
        "a bit": torch.empty(1, dtype=torch.uint8).view(torch.bits8)[0],
        "wide unsigned numbers": torch.tensor([1, 2], dtype=torch.uint16),
        "tiny fractions": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "a tensor type": torch.int64,
        "a device": torch.device("cpu"),
    }
