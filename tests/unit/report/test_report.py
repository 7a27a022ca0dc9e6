"""A report: its data are exact and bounded, and the page is self-contained and escapes its texts."""

import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.processes.fake_clock import Clock
from support.tiers.settled_tiers import NO_SPARE, quick_disk, service_of, tensors, tiers_settled, whole_host

from raydix.actors import LocalPrefixCache
from raydix.actors.observe.count_history import History
from raydix.actors.observe.namespace_hits import NamespaceUse, namespace_label
from raydix.actors.report.page import render
from raydix.actors.report.treemap import Rect, squarify
from raydix.actors.service.cache_service import CacheService
from raydix.cache_core import KVCache, RadixCache, RadixKey, TokenToKVPoolAllocator
from raydix.cache_core.outline import OutlineNode
from raydix.cache_core.tiers.look_up import LookUp
from raydix.schemas import (
    AcquireRequest,
    CacheConfig,
    CacheReport,
    EvictionConfig,
    GhostConfig,
    InsertRequest,
    OpenSession,
    PoolConfig,
    PrefixUse,
    TenantConfig,
    TokenIds,
    WaitingResponse,
    WaitRequest,
    frame_namespace,
)

VOID = {"meta"}  # elements without an end


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def service(clock: Clock) -> CacheService:
    """Four pages of four tokens."""
    config = CacheConfig(
        page_size=4,
        pool=PoolConfig(num_slots=16, device="cpu"),
        eviction=EvictionConfig(high_watermark=1.0),
        ghost=GhostConfig(),
    )
    return CacheService(config, "epoch", clock=clock)


def send(service: CacheService, tokens: list[int], extra_key: str | None = None) -> None:
    service.insight.history.note()
    key = RadixKey(tokens, extra_key)
    service.core.acquire("lease", "session", key)
    service.core.insert("lease", "session", len(key), key[:0])
    service.core.release("lease", "session")
    service.core.leases.ended.__init__(0)  # type: ignore[misc]  # the id is used again


class Page(HTMLParser):
    """The text of a page, the tags that are open, and every attribute that there is."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.open: list[str] = []
        self.attributes: set[str] = set()
        self.tags: set[str] = set()
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] != "style":
            self.text.append(data.strip())


def page_of(service: CacheService, title: str = "kv-0") -> Page:
    return Page(render(service.report(), service.config, title))


def test_an_empty_cache_has_a_page_that_says_so(service: CacheService) -> None:
    text = page_of(service).text

    assert "kv-0" in text
    assert (text[text.index("hit rate") + 1], text[text.index("pool in use") + 1]) == ("-", "-")
    assert not any("%" in each and "evicts from" not in each for each in text)
    assert "No request was refused." in text
    for sentence in ("No requests yet.", "No tokens are cached yet.", "No tokens were evicted yet."):
        assert sentence in text


def test_the_page_tells_what_the_cache_counted(service: CacheService, clock: Clock) -> None:
    for prompt in ([1] * 16, [2] * 16, [1] * 16, [1] * 8):
        send(service, prompt)
        clock.now += 1

    stats, text = service.stats(), page_of(service).text

    assert (stats.tokens_requested, stats.tokens_reused, stats.tokens_evicted) == (56, 8, 32)
    assert text[text.index("hit rate") + 1] == "14.29 %"
    assert text[text.index("tokens evicted") + 1] == "32"
    assert "cached, evictable: 16" in text
    assert "Twice the pool would give about +28.6 points: 42.9 % hits." in text
    assert text[text.index("1x") :][:4] == ["1x", "16", "14.29 %", "counted"]
    assert text[text.index("2x") :][:4] == ["2x", "32", "about 42.9 %", "+28.6"]


def lines_of(html: str, title: str, style: str = "curve") -> list[list[tuple[float, float]]]:
    """The points of the lines of a style in the chart with that title: 1,000 wide, 300 high, y from the top down."""
    drawing = html.split(f'aria-label="{title}">')[1].split("</svg>")[0]
    rows = re.findall(rf'class="{style}" points="([^"]*)"', drawing)
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in row.split())] for row in rows]


def test_the_hit_rate_is_drawn_over_time_with_gaps_where_nothing_was_asked(service: CacheService, clock: Clock) -> None:
    for second in range(5):
        clock.now = second
        service.insight.history.note()
        if second != 2:
            send(service, [1] * (8 if second < 2 else 16))  # 0 of 8 hit, 8 of 8; none; 8 of 16, 16 of 16
    clock.now = 5

    html = render(service.report(), service.config, "kv-0")

    assert lines_of(html, "hit rate over time") == [
        [(0, 300), (200, 300), (200, 0), (400, 0)],
        [(600, 150), (800, 150), (800, 0), (1000, 0)],
    ]


def test_windows_of_the_hit_rate_are_equal_though_the_history_is_not(service: CacheService, clock: Clock) -> None:
    for clock.now in (0, 1, 2, 8):  # like a trace: time does not pass between requests
        send(service, [1] * 8)

    lines = lines_of(render(service.report(), service.config, "kv-0"), "hit rate over time")

    # Four times of 2 s: 8 of 16 hit, 8 of 8, none came, 8 of 8.
    assert lines == [[(0, 150), (250, 150), (250, 0), (500, 0)], [(750, 0), (1000, 0)]]


def test_a_long_history_is_drawn_in_a_bounded_number_of_steps(service: CacheService, clock: Clock) -> None:
    for second in range(300):
        clock.now = second
        send(service, [1] * 16)

    (line,) = lines_of(render(service.report(), service.config, "kv-0"), "hit rate over time")

    assert len(line) <= 2 * 65
    assert (line[0][0], line[-1][0]) == (0, 1000)


def rows_of(page: Page, *cells: str) -> bool:
    """Whether these cells stand one after the other."""
    return any(tuple(page.text[at : at + len(cells)]) == cells for at in range(len(page.text)))


def test_the_page_shows_the_tenants() -> None:
    config = CacheConfig(
        page_size=4,
        pool=PoolConfig(num_slots=16, device="cpu"),
        eviction=EvictionConfig(high_watermark=1.0),
        tenants=(TenantConfig(name="<search>", extra_key="s", floor_slots=4, cap_slots=12),),
    )
    service = CacheService(config, "epoch")
    send(service, [1] * 8, frame_namespace("s", None, None))
    send(service, [1] * 4)

    page = page_of(service)

    assert rows_of(page, "<search>", "8", "4 / 12", "0")
    assert rows_of(page, "all others", "4", "0 / -", "0")


def test_the_page_shows_why_requests_were_refused(service: CacheService) -> None:
    report = service.report()
    stats = report.stats.model_copy(update={"refusals": {"no_wait": 1, "never_fits": 3, "of_tomorrow": 0}})

    page = Page(render(report.model_copy(update={"stats": stats}), service.config, "kv-0"))

    assert rows_of(page, "larger than the pool or the tenant's share: it can never fit", "75.0 %", "3")
    assert rows_of(page, "too few free slots, and the request did not wait (timeout_s=0)", "25.0 %", "1")
    assert "of_tomorrow" not in page.text


def test_top_prefixes_are_those_that_were_reused_most_and_end_where_others_branch_off() -> None:
    config = CacheConfig(page_size=4, pool=PoolConfig(num_slots=256, device="cpu"))
    service = CacheService(config, "epoch")
    system, name = list(range(1, 13)), frame_namespace(None, "a", None)
    for last in (50, 51, 52, 50):
        send(service, system + [last] * 4, name)
    send(service, [7] * 32)

    first, second, *others = service.report().prefixes

    assert first == PrefixUse(
        namespace="lora_id=a",
        tokens=tuple(system[:8]),
        run_tokens=tuple(system[:8]),
        num_tokens=12,
        num_hits=3,
        num_slots=24,
        num_leases=0,
        is_whole=True,
    )
    assert (second.tokens, second.run_tokens, second.num_tokens, second.num_hits) == (
        tuple(system[:8]), (50,) * 4, 16, 1,
    )  # fmt: skip
    assert [(each.num_tokens, each.num_hits, each.num_slots) for each in others] == [(32, 0, 32), *[(16, 0, 16)] * 2]
    page = page_of(service)
    assert rows_of(page, "1 2 3 4 5 6 … (lora_id=a)", "12", "3", "24", "0")
    assert rows_of(page, "1 2 3 4 5 6 … 50 50 50 … (lora_id=a)", "16", "1", "16", "0")


def test_prefixes_whose_pages_begin_alike_are_named_by_the_tokens_in_which_they_differ() -> None:
    service = CacheService(CacheConfig(page_size=8, pool=PoolConfig(num_slots=64, device="cpu")), "epoch")
    for last in (50, 51, 50, 51):
        send(service, [1, 2, 3, 4, 5, 6, 7, last])

    page = page_of(service)

    assert rows_of(page, "1 2 3 4 5 6 … 50 … (no namespace)", "8", "1", "8", "0")
    assert rows_of(page, "1 2 3 4 5 6 … 51 … (no namespace)", "8", "1", "8", "0")


def test_a_prefix_that_grew_piece_by_piece_is_one() -> None:
    service = CacheService(CacheConfig(pool=PoolConfig(num_slots=64, device="cpu")), "epoch")
    for length in (2, 5, 9, 9):
        send(service, list(range(length)))

    (prefix,) = service.report().prefixes

    assert (prefix.tokens, prefix.run_tokens) == (tuple(range(8)),) * 2
    assert (prefix.num_tokens, prefix.num_hits, prefix.num_slots) == (9, 3, 9)


def test_of_a_large_tree_the_page_marks_estimates() -> None:
    service = CacheService(CacheConfig(pool=PoolConfig(num_slots=16_384, device="cpu")), "epoch")
    for number in range(4_000):
        send(service, [1] * 4 + [number])

    first = service.report().prefixes[0]

    assert (first.num_tokens, first.is_whole) == (4, False)
    assert (first.num_hits, first.num_slots) == pytest.approx((3_999, 4_004), rel=0.01)
    assert rows_of(page_of(service), "1 1 1 1 (no namespace)", "4", f"~{first.num_hits:,}", f"~{first.num_slots:,}")


def test_where_a_kind_has_no_tree_to_show_the_page_says_so() -> None:
    config = CacheConfig(kind="trie", page_size=4, pool=PoolConfig(num_slots=16, device="cpu"))
    service = CacheService(config, "epoch")
    send(service, [1] * 8)

    text = page_of(service).text

    assert text.count("Not available for this kind of cache; raydix tree shows the largest branches.") == 2
    assert "No tokens are cached yet." not in text


def test_boxes_of_the_tree_map_are_named_by_their_first_tokens(service: CacheService) -> None:
    send(service, [1, 2, 3, 4] * 4)

    (part,) = service.report().tree

    assert part.tokens == (1, 2, 3, 4, 1, 2, 3, 4)
    assert "no namespace: 16 tokens" in page_of(service).text


def test_the_page_tells_of_no_size_that_was_not_followed() -> None:
    config = CacheConfig(pool=PoolConfig(num_slots=16, device="cpu"), ghost=GhostConfig(max_factor=1.5))
    service = CacheService(config, "epoch")
    send(service, [1] * 8)

    assert not any("Twice the pool" in text for text in page_of(service).text)


def test_of_windows_and_states_the_page_says_that_larger_pools_are_told_of_full_kv_alone() -> None:
    config = CacheConfig(
        pool=PoolConfig(num_slots=16, device="cpu"), sliding_window_size=4, ghost=GhostConfig(max_factor=2)
    )
    service = CacheService(config, "epoch")
    send(service, [1] * 8)

    assert any("points: 0.0 % hits. This counts full KV alone" in text for text in page_of(service).text)


def test_the_page_asks_nobody_for_anything(service: CacheService) -> None:
    send(service, [1] * 16)
    html = render(service.report(), service.config, "kv-0")

    page = Page(html)

    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "form", "base"})
    assert page.attributes.isdisjoint({"src", "href", "srcset", "data", "action", "onload", "onclick"})
    assert not any(word in html for word in ("http:", "https:", "@import", "url("))


def test_names_are_shown_as_they_are_and_do_nothing(service: CacheService) -> None:
    name = "<script>alert('x')</script>&"
    send(service, [1] * 16, frame_namespace(name[:20], None, None))

    page = page_of(service, title=name)

    assert "script" not in page.tags
    assert name in page.text
    assert f"extra_key={name[:20]}" in page.text


def test_control_and_format_characters_of_names_are_shown_as_escapes(service: CacheService) -> None:
    name = "a\x1b]0;b\u202e\u2028"
    send(service, [1] * 16, frame_namespace(name, None, None))

    html = render(service.report(), service.config, title=name)

    assert not any(char in html for char in "\x1b\u202e\u2028")
    assert html.count(r"a\x1b]0;b\u202e\u2028") >= 5  # title, heading, namespace, box, tooltip


def test_evicted_tokens_are_as_old_as_their_last_use(service: CacheService, clock: Clock) -> None:
    send(service, [1] * 8)
    send(service, [2] * 8)
    clock.now = 20
    send(service, [1] * 8)
    clock.now = 25
    send(service, [3] * 16)  # 2 goes, unused for 25 s, and 1, for 5 s

    ages = {age.below_s: age.num_tokens for age in service.report().eviction_ages if age.num_tokens}

    assert ages == {10: 8, 30: 8}
    page = page_of(service)
    assert rows_of(page, "3 s to 10 s", "50.0 %", "8")
    assert rows_of(page, "10 s to 30 s", "50.0 %", "8")


def test_what_is_evicted_time_and_again_is_counted_each_time(service: CacheService, clock: Clock) -> None:
    for number in range(30):
        send(service, [number % 3] * 8)  # of which two have room
        clock.now += 2

    report = service.report()

    ages = {age.below_s: age.num_tokens for age in report.eviction_ages if age.num_tokens}
    assert ages == {10: 28 * 8}
    assert report.stats.tokens_evicted == 28 * 8


def test_namespaces_are_counted_apart_and_the_small_ones_together() -> None:
    cache = KVCache(RadixCache(4, None, allocator := TokenToKVPoolAllocator(8_192, 4)), allocator)
    use = NamespaceUse()
    cache.observers.append(use)
    for number in range(1_000):
        key = RadixKey([1] * 8, frame_namespace(f"{number}", None, None))
        for name in ("a", "b") if number == 0 else ("a",):
            cache.acquire(f"{number}{name}", "s", key)
            cache.insert(f"{number}{name}", "s", 8, key[:0])
            cache.release(f"{number}{name}", "s")

    first, second, others = use.stats(2)

    assert (first.label, first.requests, first.tokens_requested, first.tokens_reused) == ("extra_key=0", 2, 16, 8)
    assert second.requests == 1
    assert (others.label, others.requests, others.tokens_requested, others.tokens_reused) == (
        "all others", 998, 998 * 8, 0,
    )  # fmt: skip
    assert len(use._counts) <= 512


@pytest.fixture
def tiered(clock: Clock) -> CacheService:
    """Four pages of four tokens, above 16."""
    config = CacheConfig(
        page_size=4, pool=tensors(16), eviction=NO_SPARE, host=whole_host(64), ghost=GhostConfig()
    )  # fmt: skip
    return service_of(config, clock=clock)


async def serve(service: CacheService, tokens: list[int], namespace: str | None = None) -> None:
    """Serve a request with messages, as only these load; then the tiers get its KV."""
    service.insight.history.note()
    if not len(service.sessions):
        service.open_session(OpenSession(session_id="session", owner="test"))
    lease_id, nothing = f"lease-{service.stats().requests}", TokenIds.pack([])
    acquire = AcquireRequest(lease_id, TokenIds.pack(tokens), namespace)
    insert = InsertRequest(lease_id, len(tokens), nothing, release=True)
    (answer,) = service.execute("session", service.epoch, (acquire,)).responses
    if isinstance(answer, WaitingResponse):
        answer = await service.wait(WaitRequest(session_id="session", epoch=service.epoch, ticket=answer.ticket))
    (inserted,) = service.execute("session", service.epoch, (insert,)).responses
    assert not isinstance(answer, Exception) and not isinstance(inserted, Exception)
    await tiers_settled(service)


async def test_loaded_tokens_are_a_part_of_the_hits_of_their_namespace_and_time(
    tiered: CacheService, clock: Clock
) -> None:
    name = frame_namespace("a", None, None)
    for clock.now, prompt in enumerate(([1] * 16, [2] * 16, [1] * 16, [3] * 8)):
        await serve(tiered, prompt, name if prompt == [1] * 16 else None)
    clock.now = 4

    report, html = tiered.report(), render(tiered.report(), tiered.config, "kv-0")

    assert report.stats.host is not None
    assert (report.stats.tokens_reused, report.stats.host.tokens_loaded) == (16, 16)
    assert [(row.label, row.tokens_reused, row.tokens_loaded) for row in report.namespaces] == [
        ("extra_key=a", 16, 16), ("no namespace", 0, 0)
    ]  # fmt: skip
    assert [point.tokens_loaded for point in report.history] == [0, 0, 0, 16, 16]
    with_host, alone = (lines_of(html, "hit rate over time", style)[0] for style in ("curve", "alone"))
    assert [y for _, y in with_host] == [300, 300, 300, 300, 0, 0, 300, 300]
    assert [y for _, y in alone] == [300] * 8


async def test_a_request_that_begins_again_behind_its_load_is_counted_once(tiered: CacheService) -> None:
    for prompt in ([1] * 16, [2] * 16):
        await serve(tiered, prompt)
    assert tiered.host is not None
    loads, key = tiered.host.loads.moves, RadixKey([1] * 16)

    load = loads.prepare(tiered.core.acquire("lease", "s", key), LookUp(key))
    assert load is not None
    tiered.core.reset()
    assert loads.complete(load, load.num_pages).must_restart
    tiered.core.acquire("lease", "s", key)

    (row,) = tiered.report().namespaces
    stats = tiered.stats()
    assert (row.requests, row.tokens_requested) == (stats.acquires, stats.tokens_requested) == (3, 48)
    assert (row.tokens_reused, row.tokens_loaded) == (stats.tokens_reused, 0) == (0, 0)


async def test_the_page_tells_how_full_the_host_tier_is_and_what_it_gave(tiered: CacheService) -> None:
    for prompt in ([1] * 16, [2] * 16, [1] * 16):
        await serve(tiered, prompt)

    text = page_of(tiered).text
    without = page_of(service_of(tiered.config.model_copy(update={"host": None}), clock=Clock(0.0))).text

    place = text.index("The host tier")
    figures = text[place + 1 :]
    assert figures[:3] == ["in use", "50.0 %", "32 of 64 slots"]
    assert figures[figures.index("tokens loaded") :][:3] == ["tokens loaded", "16", "100.0 % of the reused"]
    assert figures[figures.index("tokens dropped") :][:3] == ["tokens dropped", "0", "0.0 % of the evicted"]
    assert any("host tier of 64 slots" in line for line in text)
    assert "loaded" in text and "of the pool alone" in text
    assert "The host tier" not in without and "loaded" not in without


@pytest.mark.parametrize("state", ["reserving", "the host pool needs 8 GiB"])
def test_the_page_says_why_a_host_tier_does_not_work(tiered: CacheService, state: str) -> None:
    tier = tiered.stats().host
    assert tier is not None
    stats = tiered.stats().model_copy(update={"host": tier.model_copy(update={"state": state})})

    text = Page(render(tiered.report().model_copy(update={"stats": stats}), tiered.config, "kv-0")).text

    said = (
        "Its memory is being reserved: it takes nothing yet." if state == "reserving" else f"It does not work: {state}"
    )
    assert said in text


async def test_other_sizes_of_the_pool_are_estimated_without_the_host_tier(tiered: CacheService) -> None:
    alone = service_of(tiered.config.model_copy(update={"host": None}), clock=Clock(0.0))
    for service in (alone, tiered):
        for number in range(40):
            await serve(service, [number % 3] * 8)

    assert tiered.stats().hit_rate > alone.stats().hit_rate
    assert tiered.stats().ghost == alone.stats().ghost
    assert any("All rates here are those of a pool without the host tier." in text for text in page_of(tiered).text)


@pytest.fixture
def on_disk(clock: Clock, tmp_path: Path) -> CacheService:
    """Four pages of four tokens, above a disk of 16 pages."""
    config = CacheConfig(
        page_size=4,
        pool=tensors(16),
        eviction=EvictionConfig(high_watermark=1.0),
        disk=quick_disk(tmp_path, 64),
        fingerprint="m",
        ghost=GhostConfig(),
    )
    return service_of(config, clock=clock)


async def test_the_page_tells_how_full_the_disk_is_and_what_it_gave(on_disk: CacheService) -> None:
    for prompt in ([1] * 16, [1] * 16, [2] * 16, [1] * 16):
        await serve(on_disk, prompt)

    text = page_of(on_disk).text
    without = page_of(service_of(on_disk.config.model_copy(update={"disk": None}), clock=Clock(0.0))).text

    figures = text[text.index("The disk") + 1 :]
    assert figures[:3] == ["in use", "25.0 %", "16 of 64 slots"]
    assert figures[figures.index("tokens loaded") :][:3] == ["tokens loaded", "16", "50.0 % of the reused"]
    assert figures[figures.index("prefixes not written") :][:3] == [
        "prefixes not written", "0", "first uses: 50.0 % of 16"
    ]  # fmt: skip
    assert figures[figures.index("damaged records") :][:3] == ["damaged records", "0", "dropped, and not used"]
    assert any("disk of 64 slots" in line for line in text)
    assert "with the tokens loaded from the disk" in text and "loaded" in text
    assert any("All rates here are those of a pool without the disk." in line for line in text)
    assert "The disk" not in without and "loaded" not in without


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"state": "opening"}, "It is being opened: it takes nothing yet."),
        ({"state": "reading"}, "Its index is being read."),
        ({"state": "locked by pid 7"}, "It does not work: locked by pid 7"),
        ({"state": "failed: /x is no folder"}, "It does not work: failed: /x is no folder"),
        (
            {"uncommitted_s": 12.0},
            "A retirement is not committed for 12 s: a restart now may bring its pages back.",
        ),
        ({"admit": "all", "tokens_dropped": 7}, "before they were written"),
    ],
)
def test_the_page_says_what_is_wrong_with_a_disk(
    on_disk: CacheService, fields: dict[str, object], expected: str
) -> None:
    disk = on_disk.stats().disk
    assert disk is not None
    stats = on_disk.stats().model_copy(update={"disk": disk.model_copy(update=fields)})

    text = Page(render(on_disk.report().model_copy(update={"stats": stats}), on_disk.config, "kv-0")).text

    assert expected in text


def test_requests_without_a_namespace_are_called_what_the_tree_calls_them() -> None:
    assert namespace_label(None) == "no namespace"


def test_history_of_any_length_has_a_bounded_number_of_points_at_equal_distances(
    service: CacheService, clock: Clock
) -> None:
    history = History(service.core, clock)

    for second in range(5_000):
        clock.now = second
        history.note()

    distances = {b.at_s - a.at_s for a, b in zip(history.points, history.points[1:], strict=False)}
    assert history.points[0].at_s == 0
    assert history.points[-1].at_s > 4_980
    assert distances == {16}


def count(nodes: list[OutlineNode]) -> int:
    return sum(1 + count(node.children) for node in nodes)


def test_a_large_tree_is_judged_by_a_bounded_number_of_its_nodes() -> None:
    cache = RadixCache(1)
    for first in range(20):
        for second in range(400):
            cache.insert(RadixKey([first, second, 0, 0]))
    cache.insert(RadixKey([7] * 100, extra_key="small"))

    all_of_it, some = cache.sample(100_000).nodes, cache.sample(200).nodes

    assert [(node.extra_key, node.tokens_below, node.num_nodes) for node in all_of_it] == [
        (None, 20 + 20 * 400 * 3, 1 + 20 + 20 * 400), ("small", 100, 2),
    ]  # fmt: skip
    assert count(some) <= 200
    assert [node.extra_key for node in some] == [None, "small"]
    assert some[0].tokens_below == pytest.approx(all_of_it[0].tokens_below, rel=0.01)


@pytest.mark.parametrize(("there", "looked_at"), [(50, 50), (100, 100), (101, 51), (1_000, 100)])
def test_of_many_namespaces_an_even_choice_is_looked_at_and_below_each_top(there: int, looked_at: int) -> None:
    cache = RadixCache(1)
    for number in range(there):
        cache.insert(RadixKey([1, 2], extra_key=f"{number}"))

    sample = cache.sample(200)

    assert (len(sample.nodes), sample.num_namespaces) == (looked_at, there)
    assert {node.tokens_below for node in sample.nodes} == {2}


def test_namespaces_that_were_not_looked_at_make_the_others_no_larger() -> None:
    config = CacheConfig(page_size=1, pool=PoolConfig(num_slots=8_192, device="cpu"))
    service = CacheService(config, "epoch")
    for number in range(1_025):
        send(service, [1] * 4, frame_namespace(f"{number}", None, None))

    assert {part.num_tokens for part in service.report().tree} == {4}


def test_a_chain_of_many_nodes_is_one_node() -> None:
    cache = RadixCache(1)
    for stop in range(1, 3_000):
        cache.insert(RadixKey(list(range(stop))))

    (node,) = cache.sample(10_000).nodes

    assert (node.own_tokens, node.tokens_below, node.children) == (2_999, 2_999, [])


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_map_gives_each_size_its_area_and_none_to_two(seed: int) -> None:
    rng = random.Random(seed)
    sizes = sorted((rng.expovariate(1) * rng.choice((0, 1, 1)) for _ in range(rng.randrange(2, 40))), reverse=True)
    whole = Rect(10, 20, 160, 100)

    rects = squarify(sizes, whole)

    for size, rect in zip(sizes, rects, strict=True):
        assert rect.width * rect.height == pytest.approx(size / sum(sizes) * 16_000)
        assert rect.x >= 10 - 1e-6 and rect.x + rect.width <= 170 + 1e-6
        assert rect.y >= 20 - 1e-6 and rect.y + rect.height <= 120 + 1e-6
    for place, a in enumerate(rects):
        for b in rects[:place]:
            wide = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
            high = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
            assert min(wide, high) < 1e-6


def test_sizes_of_nothing_have_no_area() -> None:
    assert squarify([], Rect(0, 0, 1, 1)) == []
    assert all(rect.width * rect.height == 0 for rect in squarify([0, 0], Rect(0, 0, 1, 1)))


@pytest.mark.parametrize("sizes", [[1, 0], [1, 1, 0], [4, 2, 0, 0, 0]])
@pytest.mark.parametrize("whole", [Rect(0, 0, 100, 100), Rect(0, 0, 30, 70), Rect(0, 0, 0, 5)])
def test_what_has_no_size_has_no_area_beside_what_has(sizes: list[float], whole: Rect) -> None:
    areas = [rect.width * rect.height for rect in squarify(sizes, whole)]

    assert areas == pytest.approx([size / sum(sizes) * whole.width * whole.height for size in sizes])


def test_prompts_of_one_length_have_a_page(service: CacheService) -> None:
    for prompt in ([1] * 8, [2] * 8):
        send(service, prompt)

    assert "Cached tokens" in page_of(service).text


def test_a_report_travels_as_json(service: CacheService) -> None:
    send(service, [1] * 16)
    report = service.report()

    assert CacheReport.model_validate_json(report.model_dump_json()) == report


@pytest.mark.parametrize(("kind", "ages"), [("radix", [10, 20, 10]), ("trie", [None] * 3)])
async def test_the_tree_tells_how_long_each_node_was_not_used(kind: str, ages: list[float | None]) -> None:
    clock = Clock()
    config = CacheConfig(kind=kind, page_size=8, pool=PoolConfig(num_slots=64, device="cpu"))
    async with LocalPrefixCache(config) as cache:
        cache._host.service.use_clock(clock)
        for prompt in ([1] * 8, [2] * 16):
            cache._host.service.insight.history.note()
            await (await cache.acquire(prompt)).insert(prompt, release=True)
            clock.now += 10

        branches = (await cache.tree()).branches

    # The namespace, then the larger node, then the other.
    assert [each.unused_s for each in branches] == [ages[0], ages[2], ages[1]]
    assert [each.age for each in branches] == [0, 0, branches[2].age]
    assert branches[2].age > 0
