"""`examples/serve_app.py`: replicas share their node's cache; without Serve, the error names the package to install."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, logging, socket, urllib.error, urllib.request
import ray
from ray import serve

quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
ray.init("local", num_cpus=4, runtime_env={"working_dir": working_dir}, **quiet)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
serve.start(http_options={"port": port})
import serve_app
handle = serve.run(serve_app.app, name="model")

from raydix.actors import connect
from ray.util import list_named_actors
(name,) = [each["name"] for each in list_named_actors(all_namespaces=True) if each["namespace"] == "raydix"]
prompt = list(range(64))
first = handle.generate.remote(prompt, 4).result()
sessions = ray.get(connect(name).stats.remote()).open_sessions
again = [handle.generate.remote(prompt, 4) for _ in range(12)]
body = json.dumps({"token_ids": prompt, "max_new_tokens": 4}).encode()
again = [each.result() for each in again] + [json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}", body))]
refused = []
for bad in ({"token_ids": [1], "max_new_tokens": 10**13}, {"token_ids": []}, {"token_ids": [1], "max": 2}, [1], "{"):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}", bad.encode() if bad == "{" else json.dumps(bad).encode())
    except urllib.error.HTTPError as error:
        refused.append(error.code)
print(json.dumps({"first": first, "again": again, "sessions": sessions, "refused": refused}))
serve.shutdown()
ray.shutdown()
"""
ROUTED = """
import json, logging, os, socket, time, urllib.request
os.environ["RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = "100"  # the machine may be busy
import ray
from ray import serve

quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
ray.init("local", num_cpus=4, runtime_env={"working_dir": working_dir}, **quiet)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
serve.start(http_options={"port": port})
import serve_app
serve.run(serve_app.routed(serve_app.Layout(tokens_of_timeout_s=60)), name="model")  # the machine may be busy

from ray.util import list_named_actors
names = sorted(each["name"] for each in list_named_actors(all_namespaces=True) if each["namespace"] == "raydix")

def ask(tokens):
    body = json.dumps({"token_ids": tokens, "max_new_tokens": 4}).encode()
    return json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}", body))

def talk(number):
    prompt = [(37 * number + place) % 256 for place in range(96)]
    ask(prompt[:64])
    time.sleep(0.5)
    return [ask(prompt)["prefix_len"] for _ in range(4)]

deadline = time.monotonic() + 200
for number in range(100):  # until the router knows the caches
    first, *others = talk(number)
    if first >= 48 and min(others) >= 80 or time.monotonic() > deadline:
        break
talks = [talk(number) for number in range(200, 206)]
print(json.dumps({"names": len(names), "talks": talks}))
serve.shutdown()
ray.shutdown()
"""


def options() -> dict[str, str]:
    """Return the options of the command in the example's header: the import path, and the replicas' environment."""
    text = (ROOT / "examples/serve_app.py").read_text()
    (given,) = re.findall(r"^ +serve run (.*) serve_app:app\b", text, flags=re.MULTILINE)
    words = shlex.split(given)
    return dict(zip(words[::2], words[1::2], strict=True))


def run_program(text: str) -> subprocess.CompletedProcess[str]:
    """Run a program as that command does: this process imports the example, the replicas get it from the
    environment."""
    given = options()
    app_dir, working_dir = (str(ROOT / given[name]) for name in ("--app-dir", "--working-dir"))
    found = f"import sys\nsys.path.insert(0, {app_dir!r})\nworking_dir = {working_dir!r}\n"
    command = [sys.executable, "-c", found + text]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def needs_serve() -> None:
    pytest.importorskip(
        "ray.serve",
        reason="needs Ray Serve: .venv/bin/pip install -c constraints.txt -e '.[serve]'",
        exc_type=ImportError,
    )


@pytest.mark.long
@pytest.mark.ray
def test_replicas_share_the_cache_of_their_node() -> None:
    needs_serve()

    done = run_program(PROGRAM)

    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))  # Ray also prints
    assert told["first"]["prefix_len"] == 0
    assert told["sessions"] == 2
    assert [each["prefix_len"] for each in told["again"]] == [48] * 13  # from any replica: all pages but the last hit
    assert told["refused"] == [400] * 5
    assert all(each["token_ids"] == told["first"]["token_ids"] for each in told["again"])


@pytest.mark.long
@pytest.mark.ray
def test_with_a_router_each_prompt_stays_at_its_cache() -> None:
    needs_serve()

    done = run_program(ROUTED)

    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert told["names"] == 2
    for first, *others in told["talks"]:  # the second turn of each, and the same again
        assert first >= 48 and min(others) >= 80, told


@pytest.mark.more
def test_without_serve_the_example_names_the_package_to_install() -> None:
    done = run_program("sys.modules['ray.serve'] = None\nimport serve_app")

    assert done.returncode == 1
    assert "ImportError: Ray Serve needs an extra; in the clone: pip install '.[serve]'" in done.stderr.splitlines()
