"""The names of `cython` that the kernels use. Their types are those of the interpreted kernels: C integers are ints."""

from builtins import bool as _bool
from builtins import int as _int
from collections.abc import Callable
from typing import Any, Literal, Self, TypeAlias, TypeVar, overload

_T = TypeVar("_T")

class _Pointer:
    def __getitem__(self, at: _int) -> _int: ...
    def __setitem__(self, at: _int, value: _int) -> None: ...
    def __add__(self, distance: _int) -> Self: ...

compiled: _bool

bint: TypeAlias = _bool
int: TypeAlias = _int
longlong: TypeAlias = _int
Py_hash_t: TypeAlias = _int
Py_ssize_t: TypeAlias = _int
size_t: TypeAlias = _int
uint: TypeAlias = _int
ulonglong: TypeAlias = _int
const_slonglong: Any  # these three with an index: `slonglong[::1]` is an array, whose type no type checker knows
sint: Any
slonglong: Any
p_char: TypeAlias = _Pointer
p_int: TypeAlias = _Pointer
p_longlong: TypeAlias = _Pointer
p_uint: TypeAlias = _Pointer

def cclass(of: _T, /) -> _T: ...
def cfunc(of: _T, /) -> _T: ...
def ccall(of: _T, /) -> _T: ...
def boundscheck(on: _bool, /) -> Callable[[_T], _T]: ...
def cdivision(on: _bool, /) -> Callable[[_T], _T]: ...
def trashcan(on: _bool, /) -> Callable[[_T], _T]: ...
def wraparound(on: _bool, /) -> Callable[[_T], _T]: ...
def cast(to: type[_T], value: object, /) -> _T: ...
@overload
def declare(of: object, value: _T, /) -> _T: ...
@overload
def declare(of: object, /, *, visibility: Literal["public", "readonly"]) -> Any: ...
