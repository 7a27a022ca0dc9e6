"""The names that users may rely on. A name leaves these lists only with a breaking release."""

import ast
import importlib
import inspect

import pytest

PUBLIC = {
    "raydix.actors": {
        "AttachedPool",
        "Lease",
        "Loaded",
        "LocalPrefixCache",
        "PrefixCacheActor",
        "PrefixCacheClient",
        "WatchedActor",
        "acquire_ranks",
        "beside",
        "connect",
        "shutdown_cache",
        "start_cache",
        "start_cache_async",
    },
    "raydix.cache_core": {
        "BasePrefixCache",
        "ChunkCache",
        "EvictResult",
        "InsertResult",
        "KVPool",
        "MatchResult",
        "RadixCache",
        "RadixKey",
        "TokenToKVPoolAllocator",
        "TreeNode",
        "hash_bytes",
        "hash_to_int64",
        "hash_token_ids",
    },
    "raydix.schemas": {
        "AllBlocksCleared",
        "BlockRemoved",
        "BlockStored",
        "CacheBusy",
        "CacheConfig",
        "CacheError",
        "CacheStats",
        "CacheUnavailable",
        "ConfigMismatch",
        "EvictResponse",
        "EvictionConfig",
        "InsertResponse",
        "InvalidRequest",
        "KVEventBatch",
        "KVEventSnapshot",
        "LeaseConfig",
        "LeaseExpired",
        "LeaseGrant",
        "MatchResponse",
        "ModelFingerprint",
        "PoolConfig",
        "PoolExhausted",
        "PoolHandle",
        "StaleEpoch",
        "UnknownLease",
    },
}

each_package = pytest.mark.parametrize("package", sorted(PUBLIC))


def has_own_docstring(thing: object) -> bool:
    """Whether a class or function was given a docstring, not one inherited or generated from its fields."""
    doc = inspect.cleandoc(thing.__doc__ or "")
    return bool(doc) and not doc.startswith(f"{getattr(thing, '__name__', '')}(")


@each_package
def test_the_promised_names_are_public(package: str) -> None:
    public = set(importlib.import_module(package).__all__)

    assert PUBLIC[package] - public == set()


@each_package
def test_all_is_sorted_and_names_nothing_twice(package: str) -> None:
    names = list(importlib.import_module(package).__all__)

    assert names == sorted(set(names))


@each_package
def test_type_checkers_see_the_same_names(package: str) -> None:
    module = importlib.import_module(package)
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.ImportFrom)]

    assert sorted(name.name for node in imports for name in node.names if name.asname == name.name) == module.__all__


@each_package
def test_every_public_name_resolves(package: str) -> None:
    module = importlib.import_module(package)

    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@each_package
def test_every_public_name_is_listed_by_dir(package: str) -> None:
    module = importlib.import_module(package)

    assert set(module.__all__) - set(dir(module)) == set()


@each_package
def test_the_package_says_in_a_docstring_what_it_is(package: str) -> None:
    assert (importlib.import_module(package).__doc__ or "").strip()


@each_package
def test_every_public_class_and_function_has_a_docstring_of_its_own(package: str) -> None:
    module = importlib.import_module(package)
    things = {name: getattr(module, name) for name in module.__all__}

    bare = [
        name
        for name, thing in things.items()
        if (inspect.isclass(thing) or inspect.isroutine(thing)) and not has_own_docstring(thing)
    ]

    assert bare == []
