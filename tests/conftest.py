"""Fixtures and options of all tests."""

import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

WITH_CLUSTERS_OF_THEIR_OWN = {  # folders and files
    "chaos",
    "examples",
    "test_dist",
    "test_doctor",
    "test_placement",
    "test_prometheus",
    "test_unix_socket_loops",
}
WITH_CACHES_OF_THEIR_OWN = {  # folders and files whose configurations no other test has: on Ray, each starts an actor
    "kinds",
    "observe",
    "test_model_bindings",
    "test_multimodal_keys",
    "test_rank_leases",
    "test_tenants",
}
FIGURES = {"benchmark", "figures"}  # marks of tests that print what they counted or measured
LEFT_OUT = {"long": "make test-long", "more": "make test-more", "prometheus": "make test-prometheus"}
"""The marks of tests that `make test` deselects, and the command that runs these. The first mark of a test counts."""
SLOW_S = 20  # a test that takes longer is named at the end; in `make test`, none may take a minute on an idle machine
NUM_LEFT_OUT = pytest.StashKey[Counter[str]]()

# Hypothesis fails a test that takes long, also where other programs use the machine.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

# Small tensors are slower on several threads, and two processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A parent that has read its terminal's size leaves this to its children; tables are as wide as in a pipe without it.
os.environ.pop("COLUMNS", None)
# Ray kills workers where the machine's memory is nearly full, also where other programs fill it.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
# Ray runs workers at niceness 15: with two busy programs on two cores, an actor starts in 77 s in place of 3.
os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_configure(config: pytest.Config) -> None:
    """Have Ctrl-C end the tests, which send it themselves, too: a job in the background starts with SIGINT ignored."""
    config.stash[NUM_LEFT_OUT] = Counter()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def group_of(item: pytest.Item) -> str:
    """The tests that pytest-xdist must run in one process: those of a cluster, or else those of a file."""
    if not item.get_closest_marker("ray"):
        return item.path.stem
    fixtures = getattr(item, "fixturenames", ())
    own = WITH_CLUSTERS_OF_THEIR_OWN & {item.path.parent.name, item.path.stem} and "ray_cluster" not in fixtures
    return "own-cluster" if own else "cluster"


def starts_an_actor_for_itself(item: pytest.Item) -> bool:
    """Whether a test runs on Ray once more, with a cache that no other test has. Ray carries the same bytes."""
    callspec = getattr(item, "callspec", None)
    on_ray = callspec is not None and any(
        isinstance(value, str) and value == "ray" for value in callspec.params.values()
    )
    return on_ray and bool(WITH_CACHES_OF_THEIR_OWN & {item.path.parent.name, item.path.stem})


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist names the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests. Those of the shared cluster take longest and come first, then those with clusters of their own.

    So two clusters run at a time, at most.
    """
    for item in items:
        if starts_an_actor_for_itself(item):
            item.add_marker(pytest.mark.more)
    groups = {item: group_of(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: (groups[item] != "cluster", groups[item] != "own-cluster"))


@pytest.hookimpl(tryfirst=True)  # before it is printed
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a test's id without the group that pytest-xdist appends to it."""
    if hasattr(report, "node"):  # it comes from a process of pytest-xdist
        report.nodeid = re.sub(r"@[\w-]+$", "", report.nodeid)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count the tests that are left out because of a mark."""
    for item in items:
        marks = [mark for mark in LEFT_OUT if item.get_closest_marker(mark)]
        item.config.stash[NUM_LEFT_OUT].update(marks[:1])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the count, if this is a process of pytest-xdist."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = dict(session.config.stash[NUM_LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the count of a process of pytest-xdist. Each of them has collected all tests."""
    node.config.stash[NUM_LEFT_OUT] |= Counter(getattr(node, "workeroutput", {}).get("left out"))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Show what tests counted and measured, what did not run and how to run it, and the slow tests."""
    told = [each for each in terminalreporter.stats.get("passed", ()) if FIGURES & set(each.keywords)]
    for report in told:
        for title, text in report.sections:
            if title == "Captured stdout call":
                terminalreporter.write_line(f"{report.nodeid.partition('::')[2]}: {text.strip()}")
    not_run = Counter({f"{mark}: {LEFT_OUT[mark]}": number for mark, number in config.stash[NUM_LEFT_OUT].items()})
    not_run.update(each.longrepr[2].removeprefix("Skipped: ") for each in terminalreporter.stats.get("skipped", ()))
    if not_run:
        terminalreporter.section("not run, and how to run it")
        for reason, number in not_run.items():
            terminalreporter.write_line(f"{number:5}  {reason}")
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            seconds[getattr(report, "nodeid", "")] += getattr(report, "duration", 0)
    if slow := [(test, took) for test, took in seconds.most_common() if took > SLOW_S]:
        terminalreporter.section(f"slower than {SLOW_S} s")
        for test, took in slow:
            terminalreporter.write_line(f"{took:4.0f} s  {test}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a GPU, a trace or Prometheus where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch  # only here: most runs should not wait for it

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device: make test-gpu, on a machine with one")
    if item.get_closest_marker("trace") is not None and not os.environ.get("RAYDIX_TRACE"):
        pytest.skip("RAYDIX_TRACE names no trace: make test-trace RAYDIX_TRACE=conversation_trace.jsonl")
    if item.get_closest_marker("prometheus") is not None:
        missing = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
        if missing:
            pytest.skip(f"needs {' and '.join(missing)}: apt-get install prometheus, then make test-prometheus")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One small Ray cluster for all tests that need one. Each test ends the actors that it starts."""
    import ray  # only here, as above

    from raydix.actors import start_cache

    start_cache.__kwdefaults__["timeout_s"] = 300  # other programs may use the machine
    ray.init(
        "local",  # never a cluster of the machine's other users
        num_cpus=4,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def running_cache(ray_cluster: None) -> Iterator[Callable[[Any], Any]]:
    """The one cache actor of a configuration, started when it is first asked for. Leave it empty for the next test."""
    from raydix.actors import shutdown_cache, start_cache

    actors: dict[str, Any] = {}

    def running(config: Any) -> Any:
        if config.digest() not in actors:
            actors[config.digest()] = start_cache(config)
        return actors[config.digest()]

    yield running
    for actor in actors.values():
        shutdown_cache(actor)
