"""Settings from a file, the environment and options: the later overrides, and errors name the place."""

import json
from pathlib import Path

import pytest
from support.caches.pool_layers import layer_shapes

from raydix.actors.cluster.settings import Settings, as_yaml, load_settings
from raydix.actors.cluster.settings_file import SettingsError
from raydix.actors.memory.pool_shapes import layout_below
from raydix.schemas import (
    CacheConfig,
    DiskConfig,
    EvictionConfig,
    GhostConfig,
    HostConfig,
    LayerShape,
    MetricsConfig,
    PoolConfig,
    TenantConfig,
)
from raydix.schemas.shown import cut, shown

LAUGHS = ", ".join(
    f"&a{number} [{', '.join([f'*a{number - 1}'] * 9 if number else ['laugh'] * 9)}]" for number in range(40)
)  # 9**40 of them

FILE = """\
name: chat
page_size: 16
pool:
  num_slots: 1_024
  device: cpu
eviction:
  high_watermark: 0.5
  low_watermark: 0.25
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cache.yaml"
    path.write_text(FILE)
    return path


def complaint(path: Path | None, environ: dict[str, str] | None = None, options: tuple[str, ...] = ()) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(path, environ=environ or {}, options=options)
    text = f"{caught.value} / {caught.value.advice}"
    return text if path is None else text.replace(str(path), "FILE")


def test_a_file_sets_what_it_names_and_leaves_the_rest_at_its_default(file: Path) -> None:
    settings = load_settings(file, environ={})

    assert settings == load_settings(str(file), environ={})
    assert settings.name == "chat"
    assert settings.config == CacheConfig.model_validate(
        {
            "page_size": 16,
            "pool": {"num_slots": 1024, "device": "cpu"},
            "eviction": {"high_watermark": 0.5, "low_watermark": 0.25},
        }
    )


def test_options_win_over_the_environment_and_that_over_the_file(file: Path) -> None:
    environ = {"RAYDIX_PAGE_SIZE": "32", "RAYDIX_POOL_NUM_SLOTS": "2048", "RAYDIX_NAME": "of-environment"}

    from_environment = load_settings(file, environ=environ)
    from_options = load_settings(file, environ=environ, options=["pool.num_slots=4096", "name=of-options"])

    assert (from_environment.config.page_size, from_environment.config.pool.num_slots) == (32, 2048)
    assert from_environment.name == "of-environment"
    assert (from_options.config.page_size, from_options.config.pool.num_slots) == (32, 4096)
    assert from_options.name == "of-options"
    assert from_options.config.pool.device == "cpu"  # a section keeps what other layers say of it


def test_without_a_file_the_environment_and_options_suffice() -> None:
    settings = load_settings(environ={"RAYDIX_POOL_NUM_SLOTS": "64"}, options=["eviction.policy=slru"])

    assert (settings.name, settings.config.pool.num_slots, settings.config.eviction.policy) == ("kv", 64, "slru")


def test_values_are_yaml_and_texts_are_texts() -> None:
    options = ["pool.num_slots=64", "fingerprint=007", "events=full", "sliding_window_size=null"]
    options += ["pool.layers=[{count: 2, num_kv_heads: 1, head_dim: 4}]"]

    config = load_settings(environ={}, options=options).config

    assert (config.fingerprint, config.events, config.sliding_window_size) == ("007", "full", None)
    assert config.pool.layers == (LayerShape(num_kv_heads=1, head_dim=4),) * 2


def test_layers_may_be_given_as_an_option_or_a_variable() -> None:
    text, options = "[{count: 60, num_kv_heads: 2, head_dim: 4}, {num_kv_heads: 1, head_dim: 8}]", ["pool.num_slots=64"]
    environ = {"RAYDIX_POOL_LAYERS": text}

    for settings in (
        load_settings(environ={}, options=[*options, f"pool.layers={text}"]),
        load_settings(environ=environ, options=options),
    ):
        alike, other = LayerShape(num_kv_heads=2, head_dim=4), LayerShape(num_kv_heads=1, head_dim=8)
        assert settings.config.pool.layers == (*(alike,) * 60, other)
        assert "- {count: 60, num_kv_heads: 2, head_dim: 4}" in as_yaml(settings)


def test_layers_with_index_keys_may_be_given_as_an_option_and_count_in_the_bytes_of_a_token() -> None:
    layers = "[{count: 2, num_kv_heads: 1, head_dim: 8, index_head_dim: 4}, {num_kv_heads: 1, head_dim: 8}]"

    pool = load_settings(environ={}, options=[f"pool={{num_slots: 112kB, layers: {layers}}}"]).config.pool

    assert [layer.index_head_dim for layer in pool.layers] == [4, 4, 0]
    assert pool.num_slots == 112_000 // (2 * (3 * (8 + 8) + 2 * 4))


@pytest.mark.parametrize(
    ("text", "slots"),
    [("1M", 999_936), ("1e6", 999_936), ("0.5M", 499_712), ('"200,000"', 199_680), ("1_024", 1024), ("2k", 1536)],
)
def test_the_slots_of_a_pool_may_have_a_unit_and_are_then_rounded_down_to_pages(text: str, slots: int) -> None:
    options = ["page_size=512", f"pool={{num_slots: {text}, num_swa_slots: {text}}}", "sliding_window_size=512"]

    pool = load_settings(environ={}, options=options).config.pool

    assert (pool.num_slots, pool.num_swa_slots) == (slots, slots)
    environ = {"RAYDIX_POOL_NUM_SLOTS": text, "RAYDIX_PAGE_SIZE": "512"}
    assert load_settings(environ=environ).config.pool.num_slots == slots


def test_the_slots_of_a_pool_with_layers_may_be_given_in_bytes() -> None:
    shape = ["pool.layers=[{count: 2, num_kv_heads: 2, head_dim: 8, v_head_dim: 4}]", "page_size=16"]
    token_bytes = 2 * 2 * (8 + 4) * 2  # layers, heads, K and V, bytes of a number

    def num_slots(size: str, *more: str) -> int:
        options = [f"pool.num_slots={size}", *shape, *more]
        return load_settings(environ={}, options=options).config.pool.num_slots

    assert num_slots("1MiB") == 2**20 // token_bytes // 16 * 16
    assert num_slots("1MB", "pool.dtype=float8_e4m3fn") == 10**6 // (token_bytes // 2) // 16 * 16
    with pytest.raises(
        SettingsError, match=r"must hold a page, 16 tokens of 96 bytes each, not '1KiB', which is 10 to"
    ):
        num_slots("1KiB")


def test_the_limits_of_a_tenant_may_have_a_unit() -> None:
    options = [
        "page_size=16",
        "pool.num_slots=1M",
        "tenants=[{name: a, extra_key: a, floor_slots: 1k, cap_slots: 2e3}]",
    ]

    (tenant,) = load_settings(environ={}, options=options).config.tenants

    assert (tenant.floor_slots, tenant.cap_slots) == (992, 2000)
    with pytest.raises(
        SettingsError, match=r"tenants.0.cap_slots must be tokens, .* not '1GiB': a tenant has a number"
    ):
        load_settings(environ={}, options=["pool.num_slots=64", "tenants=[{name: a, cap_slots: 1GiB}]"])


LAYERS = ("pool.layers=[{count: 2, num_kv_heads: 2, head_dim: 8}]", "page_size=16", "pool.num_slots=1600")
FULL, SWA = "{num_kv_heads: 2, head_dim: 8}", "{kind: swa, num_kv_heads: 2, head_dim: 8}"
STATE = "{kind: state, state_shapes: [[1000]]}"
TOKEN_BYTES = 2 * 2 * (8 + 8) * 2  # layers, heads, K and V, bytes of a number


def tier(capacity: str | None, *options: str) -> CacheConfig:
    return load_settings(environ={}, options=[*LAYERS, *options], host_capacity=capacity).config


@pytest.mark.parametrize(
    ("capacity", "slots"),
    [("4x", 6400), ("1.03x", 1648), ("1M", 1_000_000), ("1_000", 992), ("1MiB", 2**20 // TOKEN_BYTES)],
)
def test_the_slots_of_a_host_tier_may_be_bytes_or_a_multiple_of_the_pool(capacity: str, slots: int) -> None:
    assert tier(capacity).host == HostConfig(num_slots=slots)
    assert tier(capacity, "host.num_slots=64", "host.policy=lru").host == HostConfig(num_slots=slots, policy="lru")
    assert tier(None, f"host.num_slots='{capacity}'").host == HostConfig(num_slots=slots)
    environ = {"RAYDIX_HOST_NUM_SLOTS": f"'{capacity}'"}
    assert load_settings(environ=environ, options=LAYERS).config.host == HostConfig(num_slots=slots)


@pytest.mark.parametrize(
    "more",
    [
        (),
        (f"pool.layers=[{FULL}, {SWA}]", "sliding_window_size=32", "pool.num_swa_slots=160"),
        (f"pool.layers=[{FULL}, {SWA}]", "sliding_window_size=32", "host.num_swa_slots=2x"),
        ("sliding_window_size=32",),
        (f"pool.layers=[{FULL}, {STATE}]", "kind=mamba", "pool.num_state_slots=10"),
        (
            f"pool.layers=[{STATE}, {SWA}]",
            "kind=mamba",
            "sliding_window_size=32",
            "pool.num_state_slots=10",
            "host.num_state_slots=25",
        ),
    ],
    ids=" ".join,
)
def test_a_host_tier_in_bytes_takes_at_most_as_many_and_nearly_all(more: tuple[str, ...]) -> None:
    config = tier("1MiB", *more)

    layout = layout_below(config, config.host_sizes)

    spare = sum(num_bytes for _, num_bytes in layout.shapes)  # the records of padding
    assert 0.97 * 2**20 <= layout.num_bytes - spare <= 2**20


def test_a_host_tier_below_an_opaque_pool_may_be_given_in_bytes() -> None:
    opaque = ("pool.format=opaque", "pool.slot_bytes=1024", "pool.num_slots=64", "page_size=16")

    config = load_settings(environ={}, options=opaque, host_capacity="1MiB").config

    assert config.host == HostConfig(num_slots=1024)


@pytest.mark.parametrize(
    ("options", "capacity", "expected"),
    [
        (LAYERS, "lots", "--host-capacity must be tokens, such as 200_000 or 1M, bytes, such as 64GiB, or a multiple"),
        (LAYERS, "1KiB", "--host-capacity must hold a page, 16 tokens of 128 bytes each, not '1KiB', which is 8 tok"),
        (LAYERS, "0x", "--host-capacity must hold a page, 16 tokens, not '0x', which is 0 tokens"),
        (("pool.num_slots=64",), "1GiB", "--host-capacity must be tokens, such as 200_000 or 1M, not '1GiB': the pool"),
        ((*LAYERS, "kind=chunk"), "4x", "the settings: host is for kinds 'radix' and 'mamba', not 'chunk'"),
        ((*LAYERS, "pool.layers=[{}]"), "4x", "--set pool.layers=[{}]: pool.layers.0: a layer that keeps KV needs"),
        ((*LAYERS, "host.num_slots=-4"), None, "--set host.num_slots=-4: host.num_slots: must be greater than 0"),
        ((*LAYERS, "host.num_slots=x"), None, "--set host.num_slots=x: host.num_slots must be tokens, such as 200_000"),
        ((*LAYERS, "host={num_slots: 0x}"), None, "--set host={num_slots: 0x}: "),
        (
            (*LAYERS, "sliding_window_size=32", "host.num_swa_slots=1MiB"),
            "4x",
            "--set host.num_swa_slots=1MiB: host.num_swa_slots must be tokens, such as 200_000 or 1M, not '1MiB': give",
        ),
        (
            (*LAYERS, "host.policy=lru"),
            None,
            "the settings: host.num_slots: must be set / set host.num_slots in a file",
        ),
    ],
)
def test_a_wrong_size_of_a_host_tier_is_named_with_its_place(
    options: tuple[str, ...], capacity: str | None, expected: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ={}, options=options, host_capacity=capacity)

    assert f"{caught.value} / {caught.value.advice}".startswith(expected)


ON_CPU = (*LAYERS, "pool.device=cpu")


def disk_of(disk: str | None, *options: str, num_ranks: int = 1) -> DiskConfig | None:
    return load_settings(environ={}, options=[*ON_CPU, *options], disk=disk, num_ranks=num_ranks).config.disk


@pytest.mark.parametrize(
    ("size", "fields"),
    [
        ("1GiB", {"size": 2**30}),
        ("4x", {"num_slots": 6400}),
        ("1.03x", {"num_slots": 1648}),
        ("1M", {"num_slots": 1_000_000}),
        ("1_000", {"num_slots": 992}),
    ],
)
def test_the_size_of_a_disk_tier_may_be_bytes_tokens_or_a_multiple_of_the_pool(
    size: str, fields: dict[str, int]
) -> None:
    expected = DiskConfig(path="/nvme/a:b", **fields)  # type: ignore[arg-type]
    assert disk_of(f"/nvme/a:b:{size}") == expected
    (field,) = fields
    assert disk_of(None, "disk.path=/nvme/a:b", f"disk.{field}='{size}'") == expected
    environ = {"RAYDIX_DISK_PATH": "/nvme/a:b", f"RAYDIX_DISK_{field.upper()}": f"'{size}'"}
    assert load_settings(environ=environ, options=ON_CPU).config.disk == expected


def test_a_disk_given_as_an_option_overrides_the_path_and_both_sizes_and_nothing_else() -> None:
    others = ("disk={path: /other, num_slots: 64, admit: all}", "disk.size=1TiB")

    assert disk_of("/nvme:1GiB", *others) == DiskConfig(path="/nvme", size=2**30, admit="all")
    assert disk_of("/nvme:64", *others) == DiskConfig(path="/nvme", num_slots=64, admit="all")


def test_bytes_are_divided_over_ranks_and_tokens_are_of_each() -> None:
    assert disk_of("/nvme:1GiB", num_ranks=4) == DiskConfig(path="/nvme", size=2**28)
    assert disk_of("/nvme:1M", num_ranks=4) == DiskConfig(path="/nvme", num_slots=1_000_000)
    assert disk_of(None, "disk.path=/nvme", "disk.size=1GiB", num_ranks=4) == DiskConfig(path="/nvme", size=2**30)


@pytest.mark.parametrize(
    ("options", "disk", "expected"),
    [
        (
            ON_CPU,
            "/nvme",
            "--disk must be PATH:SIZE, not '/nvme'; SIZE is tokens, such as 200_000 or 1M, bytes, such as",
        ),
        (ON_CPU, "nvme:1GiB", "--disk: disk.path: must be an absolute path, such as /nvme/raydix, not 'nvme'"),
        (ON_CPU, "/nvme:1KiB", "--disk: disk.size must have room for a record of each kind, 4,"),
        (ON_CPU, "/nvme:8", "--disk must hold a page, 16 tokens, not '8', which is 8 tokens"),
        ((*ON_CPU, "pool.device=auto"), "/nvme:1GiB", "the settings: disk needs a tier in host memory above it"),
        (("pool.num_slots=64",), "/nvme:1GiB", "the settings: disk keeps KV, and this cache has none"),
        ((*ON_CPU, "kind=chunk"), "/nvme:1GiB", "the settings: disk is for kinds 'radix' and 'mamba', not 'chunk'"),
        (
            (*ON_CPU, "disk.path=/nvme", "disk.size=1M"),
            None,
            "--set disk.size=1M: disk.size must be bytes, such as 1TiB or 2e12, not '1M' / disk.size 1MiB",
        ),
        (
            (*ON_CPU, "disk.path=/nvme", "disk.num_slots=1TiB"),
            None,
            "--set disk.num_slots=1TiB: disk.num_slots must be tokens, such as 200_000 or 1M, not '1TiB': bytes are",
        ),
        ((*ON_CPU, "disk.path=/nvme"), None, "the settings: disk: disk needs num_slots or size, one of them"),
        ((*ON_CPU, "disk=true"), None, "--set disk=true: disk: must have keys, not True / disk: {path: "),
    ],
)
def test_a_wrong_disk_is_named_with_its_place(options: tuple[str, ...], disk: str | None, expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ={}, options=options, disk=disk)

    assert f"{caught.value} / {caught.value.advice}".startswith(expected)


def test_variables_of_other_programs_are_left_alone() -> None:
    environ = {"RAYDIX_PORT": "tcp://10.0.0.1:80", "RAYDIX_TRACE": "x.jsonl", "RAYDIX_NAMESPACE": "n"}

    assert load_settings(environ=environ, options=["pool.num_slots=64"]).config.pool.num_slots == 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pagesize: 16\n", "FILE, line 1: pagesize: no such key / page_size?"),
        ("pool:\n  num_slots: 64\n  num_slot: 4\n", "FILE, line 3: pool.num_slot: no such key / pool.num_slots?"),
        ("num_slots: 64\n", "FILE, line 1: num_slots: no such key / pool.num_slots: num_slots belongs there"),
        ("pool: 64\n", "FILE, line 1: pool must have keys, not a value / indent them below it"),
        ("a: 1\npage_size: 1\npage_size: 2\n", "FILE, line 3: page_size is on line 2 already / keep one of them"),
        ("pool:\n  num_slots: -4\n", "FILE, line 2: pool.num_slots: must be greater than 0, not -4 / "),
        ("pool: {num_slots: 64}\neviction:\n  policy: lur\n", "FILE, line 3: eviction.policy: must be 'lru', 'lfu'"),
        (
            "page_size: 16\npool:\n  num_slots: 65\n",
            "FILE: num_slots (65) must be a multiple of page_size (16): set it to 64, say",
        ),
        (
            "page_size: 1e1\npool: {num_slots: 64}\n",
            "FILE, line 1: page_size: must be a whole number, not '1e1' / page_size: 10 (in YAML, 1e1 is a text)",
        ),
        (
            "pool: {num_slots: 8GiB}\n",
            "FILE, line 1: pool.num_slots must be tokens, such as 200_000 or 1M, not '8GiB': the pool has no layers",
        ),
        (
            "pool: {num_slots: 8GiB, format: opaque, swa_slot_bytes: 64}\n",
            "FILE, line 1: pool.num_slots must be tokens, such as 200_000 or 1M, not '8GiB': window slots and",
        ),
        ("pool: {num_slots: a lot}\n", "FILE, line 1: pool.num_slots must be tokens, such as 200_000, 1M or 1e6, or"),
        (
            "page_size: 16\npool: {num_slots: 1k, num_swa_slots: 1MiB}\n",
            "FILE, line 2: pool.num_swa_slots must be tokens, such as 200_000 or 1M, not '1MiB': give a number",
        ),
        (
            "pool: {num_slots: 64, device: gpu}\n",
            "FILE, line 1: pool.device: must be auto, cpu, cuda or cuda:N, with N from 0 to 99, not 'gpu': cuda",
        ),
        (
            "pool: {num_slots: 64, dtype: fp16}\n",
            "FILE, line 1: pool.dtype: must be torch's name of a dtype, not 'fp16': float16 is meant",
        ),
        (
            "pool: {num_slots: 64}\nevents: yes\n",
            "FILE, line 2: events must be full, slim or false, not true / events: full, with token ids",
        ),
        (
            "pool: {num_slots: 64}\nevents: all\n",
            "FILE, line 2: events: must be 'full', 'slim' or False, not 'all'",
        ),
        ("pool: {num_slots: 64}\nghost: true\n", "FILE, line 2: ghost must have keys, not a value"),
        (
            "pool: {num_slots: 64}\neviction: {policy: LRU}\n",
            "FILE, line 2: eviction.policy: must be 'lru', 'lfu', 'fifo', 'mru', 'filo', 'slru', 'priority' or '2q', "
            "not 'LRU' / eviction.policy: lru",
        ),
        (
            "pool: {num_slots: 64}\neviction: {high_watermark: 90%}\n",
            "FILE, line 2: eviction.high_watermark: must be a valid number, not '90%' / eviction.high_watermark: "
            "0.9, the default; fraction of slots in use",
        ),
        ("\tpage_size: 16\n", "FILE, line 1, column 1: found character '\\t' that cannot start any token / one `key:"),
        ("- 1\n", "FILE, line 1: must be a mapping / write one `key: value` per line"),
        ("pool: {\n", "FILE, line 2, column 1: expected the node content"),
        (
            "pool: {num_slots: 64}\nfingerprint: 2024-13-45\n",
            "FILE, line 2: not a YAML value: month must be in 1..12 / quote",
        ),
        ("page_size: 0x_\n", "FILE, line 1: not a YAML value: invalid literal for int()"),
        ("page_size: " + "9" * 5000, "FILE, line 1: not a YAML value: a number must have at most 64 characters"),
        ("page_size: !!timestamp x\n", "FILE, line 1: not a YAML value: "),
        ("a: " + "[" * 3000 + "]" * 3000, "FILE: nested too deeply"),
        (
            "page_size: 1:2:3\n",
            "FILE, line 1: not a YAML value: a number must have at most 64 characters and no ':', not '1:2:3' / quote",
        ),
        (
            "page_size: !!float '1:" + "59:" * 99 + "9.5'",
            "FILE, line 1: not a YAML value: a number must have at most 64 char",
        ),
        ("page_size: 0x" + "f" * 100, "FILE, line 1: not a YAML value: a number must have at most 64 characters"),
        ("page_size: !!bool " + "x" * 500, "FILE, line 1: not a YAML value: 'xxx"),
        (
            "page_size: &a 1\nmax_seq_len: *a\n",
            "FILE, line 2, column 14: aliases are not supported: write the value again",
        ),
        ("name: [" + LAUGHS + "]", "FILE, line 1, column "),
        ("pool:\n  layers: [" + LAUGHS + "]", "FILE, line 2, column "),
        ("pool: {<<: {a: 1}}\n", "FILE, line 1: pool.<<: no such key"),
        ("? [a, b]\n: 1\n", "FILE, line 1: a key must be a text"),
        ("x" * 500 + ": 1\n", "FILE, line 1: xxx"),
        (
            'fingerprint: "\\uD800"\npool: {num_slots: 64}\n',
            "FILE, line 1: fingerprint: must be a valid string",
        ),
        (
            "tenants:\n  - name: a\n    cap_slots: 4\n    cap_slots: 8\n",
            "FILE, line 4: tenants.cap_slots is on line 3 already / keep one of them",
        ),
        ("name: 7\npool: {num_slots: 64}\n", "FILE, line 1: name: must be a text, not 7"),
        ("pool:\n", "FILE, line 1: pool: must have keys, not None"),
        ("", "FILE: pool: must be set / give at least pool.num_slots: --set pool.num_slots=65536"),
        (
            "page_size: 16\npool:\n  num_slots: 64\n  num_layers: 2\n",
            "FILE, line 2: pool: num_layers is a layer's: use PoolConfig.uniform(...), or layers: [{count: 32",
        ),
        (
            "page_size: 16\npool: {device: cpu}\n",
            "FILE, line 2: pool.num_slots: must be set / set pool.num_slots in a file",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_line_and_what_to_do(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "cache.yaml"
    path.write_text(text)

    assert complaint(path).startswith(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "must have 1 to 128 characters, not 0"),
        ("x" * 129, "must have 1 to 128 characters, not 129"),
        ("../../x", "must be of printable characters"),
        ("a/b", "must be of printable characters"),
        ("..", "must be of printable characters"),
        (" kv", "must be of printable characters"),
        ("kv\x1b[31m", "must be of printable characters"),
        ("kv\u202e", "must be of printable characters"),
        ("\ud800", "must be of printable characters"),
    ],
)
def test_what_no_cache_can_be_called_is_refused_in_every_layer(file: Path, name: str, expected: str) -> None:
    file.write_text(f"name: {json.dumps(name)}\npool: {{num_slots: 64}}\n")

    assert complaint(file).startswith(f"FILE, line 1: name: {expected}")
    layers: list[tuple[tuple[str, ...], dict[str, str], str]] = [
        ((f"name={name}",), {}, f"--set name={shown(name)}"),
        ((), {"RAYDIX_NAME": name}, "environment variable RAYDIX_NAME"),
    ]
    for options, environ, place in layers:
        assert complaint(None, environ, (*options, "pool.num_slots=64")).startswith(f"{place}: name: {expected}")
    with pytest.raises(SettingsError, match=f"--name: name: {expected}"):
        load_settings(environ={}, options=["pool.num_slots=64"], name=name)


def test_a_file_is_read_up_to_a_mebibyte(tmp_path: Path) -> None:
    path = tmp_path / "cache.yaml"
    path.write_text("pool: {num_slots: 64}\n# " + "x" * 2**20)

    assert complaint(path).startswith("FILE: longer than 1,048,576 bytes")


def test_a_name_beside_the_options_wins_over_all(file: Path) -> None:
    assert load_settings(file, environ={"RAYDIX_NAME": "b"}, options=["name=c"], name="Köln 1").name == "Köln 1"


def test_what_is_wrong_is_told_in_bounded_length(tmp_path: Path) -> None:
    path = tmp_path / "cache.yaml"
    texts = (
        "name: [" + "x, " * 9_999 + "]",
        "x" * 99_999 + ": 1",
        f"pool: !<{'x' * 9999}> 1",
        "a: !!bool " + "x" * 999,
    )
    for text in texts:
        path.write_text(text)
        assert len(complaint(path)) < 600
    for option in ("x" * 99_999, "x" * 99_999 + "=1", "page_size=" + "x" * 99_999, "page_size={" + "x" * 99_999):
        assert len(complaint(None, options=(option,))) < 1500


def test_what_is_wrong_elsewhere_names_the_variable_or_option(file: Path) -> None:
    assert complaint(file, {"RAYDIX_PAGE_SIZES": "1"}) == (
        "environment variable RAYDIX_PAGE_SIZES is unknown / unset it, or set RAYDIX_PAGE_SIZE"
    )
    assert complaint(file, {"RAYDIX_PAGE_SIZE": "many"}).startswith(
        "environment variable RAYDIX_PAGE_SIZE: page_size: must be a whole number, not 'many'"
    )
    assert complaint(file, options=("pool.num_slots=x",)).startswith(
        "--set pool.num_slots=x: pool.num_slots must be tokens"
    )
    assert complaint(file, options=("pool.num_layers=2",)) == "--set pool.num_layers=2: no such key / pool.layers?"
    assert complaint(file, options=("pool.head_dim=8",)).endswith(
        "no such key / pool.layers: [{count: 32, num_kv_heads: 8, head_dim: 128}]"
    )
    assert complaint(file, options=("pool=4",)).startswith("--set pool=4: pool: must have keys, not 4")
    assert complaint(file, options=("page_size",)) == "--set page_size: no value / --set page_size=VALUE"
    assert complaint(file, options=("pool.layers={",)).startswith("--set pool.layers={: '{' is not a YAML value")
    assert complaint(file, {"RAYDIX_PAGE_SIZE": "2024-13-45"}).startswith(
        "environment variable RAYDIX_PAGE_SIZE: not a YAML value: month must be in 1..12 / quote it"
    )
    for text, expected in (("0x_", "not a YAML value: invalid literal"), ("[" * 3000, "nested too deeply")):
        place = cut(f"--set page_size={text}")
        assert complaint(file, options=(f"page_size={text}",)).startswith(f"{place}: {expected}")
    assert "cap_slots is on line 1 already" in complaint(
        file, options=("tenants=[{name: a, cap_slots: 4, cap_slots: 8}]",)
    )
    assert complaint(file.parent / "none.yaml").startswith("FILE: No such file or directory / give the path")


def test_every_variable_stands_for_one_key() -> None:
    from raydix.actors.cluster.settings import _KINDS, _VARIABLES

    assert len(_VARIABLES) == len(_KINDS)


def test_a_section_that_may_be_absent_is_switched_on_and_off_by_any_layer(tmp_path: Path) -> None:
    path = tmp_path / "cache.yaml"
    path.write_text("pool: {num_slots: 64}\nghost: {}\n")

    def ghost(*options: str, **environ: str) -> GhostConfig | None:
        return load_settings(path, environ=environ, options=options).config.ghost

    assert ghost() == GhostConfig()
    assert ghost("ghost=null") is None
    assert ghost("ghost.max_factor=4") == ghost(RAYDIX_GHOST_MAX_FACTOR="4") == GhostConfig(max_factor=4)
    assert ghost("ghost={max_factor: 4}", RAYDIX_GHOST="null") == GhostConfig(max_factor=4)
    assert ghost("ghost=null", RAYDIX_GHOST_MAX_FACTOR="4") is None
    assert ghost("ghost={}", RAYDIX_GHOST_MAX_FACTOR="4") == GhostConfig(max_factor=4)


def test_tenants_are_a_list_in_every_layer_and_their_faults_have_a_place(file: Path) -> None:
    batch = TenantConfig(name="batch", cache_salt="b", cap_slots=256)
    file.write_text(FILE + "tenants:\n  - {name: batch, cache_salt: b, cap_slots: 256}\n")

    assert load_settings(file, environ={}).config.tenants == (batch,)
    assert load_settings(file, environ={"RAYDIX_TENANTS": "[]"}).config.tenants == ()
    option = "tenants=[{name: batch, cache_salt: b, cap_slots: 256}]"
    assert load_settings(file, environ={"RAYDIX_TENANTS": "[]"}, options=[option]).config.tenants == (batch,)
    file.write_text(FILE + "tenants:\n  - {name: batch, cache_salt: b, cap_slots: many}\n")
    assert "tenants.0.cap_slots" in complaint(file)


def test_a_configuration_written_as_json_is_read_back(tmp_path: Path) -> None:
    config = CacheConfig(page_size=16, pool=PoolConfig(num_slots=1024), ghost=GhostConfig(max_factor=4))
    path = tmp_path / "cache.yaml"

    for text in (config.model_dump_json(indent=2), config.model_dump_json(exclude_defaults=True)):
        path.write_text(text)
        assert load_settings(path, environ={}).config == config


@pytest.mark.parametrize(
    "config",
    [
        CacheConfig(pool=PoolConfig(num_slots=64)),
        CacheConfig(pool=PoolConfig(num_slots=64), ghost=GhostConfig(), metrics=MetricsConfig()),
        CacheConfig(
            page_size=8,
            sliding_window_size=16,
            pool=PoolConfig(num_slots=64, layers=layer_shapes(("full", "swa"))),
            eviction=EvictionConfig(high_watermark=1 / 3, low_watermark=1e-9),
        ),
        CacheConfig(pool=PoolConfig(num_slots=64, layers=layer_shapes(("full",) * 3, 4, 8, 6, 3, (1, 2)))),
        CacheConfig(kind="mamba", pool=PoolConfig(num_slots=64, num_state_slots=4, layers=layer_shapes(("state",)))),
        CacheConfig(
            pool=PoolConfig(num_slots=64),
            tenants=tuple(
                TenantConfig(name=name, extra_key=name, floor_slots=1) for name in ("on", "007", "12:30", "é\n- 😀")
            ),
        ),
        CacheConfig(kind="slots", max_seq_len=32, pool=PoolConfig(num_slots=64), fingerprint="1e5"),
    ],
)
def test_what_is_written_of_settings_is_read_as_the_same(config: CacheConfig, tmp_path: Path) -> None:
    settings, path = Settings("null", config), tmp_path / "cache.yaml"

    path.write_text(as_yaml(settings))

    assert load_settings(path, environ={}) == settings
    assert load_settings(path, environ={}).config.digest() == config.digest()


def test_defaults_are_not_written() -> None:
    config = CacheConfig(page_size=16, pool=PoolConfig(num_slots=64), ghost=GhostConfig())

    assert as_yaml(Settings("chat", config)) == "name: chat\npage_size: 16\npool: {num_slots: 64}\nghost: {}\n"
