"""Build the packages. Two variables of the environment change the result.

The modules of `cache_core/kernels` are compiled by Cython if there is a C compiler; otherwise they are interpreted.
`RAYDIX_PLAIN=1` builds a wheel without compiled modules, for any platform.

`RAYDIX_URL` is the address of the repository, such as https://github.com/team/raydix. The project's links and those of
its description lead to the files of the tag v0.2.0 there (`/blob/v0.2.0/...`, as GitHub and GitLab have them). Without
the variable the description names the files of the source distribution.

A build from a clone notes the clone's commit, for `raydix.__version__`.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from contextlib import chdir
from hashlib import sha256
from pathlib import Path
from runpy import run_path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

PACKAGE = "raydix.cache_core.kernels"
DIRECTIVES = {"binding": False, "nonecheck": True}
# Files of a source distribution besides the packages, in the words of a MANIFEST.in.
DOCUMENTS = ("include *.md constraints*.txt", "graft examples", "global-exclude *.py[cod]")
FENCED = re.compile(r"(^```.*?^```$)", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)\)")


class BuildKernels(build_ext):
    """Compiles all of the modules, or none."""

    def run(self) -> None:
        """Build the modules, and write the hashes of their sources into a file next to them."""
        super().run()
        built = [Path(self.get_ext_fullpath(extension.name)) for extension in self.extensions]
        if all(path.exists() for path in built):
            hashes = {source.stem: hash_of(source) for source in sources}
            (built[0].parent / "compiled.json").write_text(json.dumps(hashes))

    def build_extensions(self) -> None:
        """Translate and compile the modules. If one fails, remove the others and log a warning."""
        for extension in self.extensions:
            extension.sources = [self._translated(Path(extension.sources[0]))]
        self.parallel = True
        super().build_extensions()
        compiled = [Path(path) for path in self.get_outputs()]
        if not all(path.exists() for path in compiled):
            for path in compiled:
                path.unlink(missing_ok=True)
            self.warn("the core will be interpreted, and is slower: its modules could not be compiled; install gcc")

    def _translated(self, source: Path) -> str:
        """Return the path of the C source that Cython makes of a copy of a module.

        The copy ends with the hash of the module, which `kernels/__init__.py` compares. Tracebacks name its path below
        the build folder.
        """
        copy = Path(*PACKAGE.split("."), source.name)
        text = f'{source.read_text()}\nSOURCE_HASH = "{hash_of(source)}"\n'
        folder = Path(self.build_temp)
        (folder / copy.parent).mkdir(parents=True, exist_ok=True)
        with chdir(folder):
            if not copy.exists() or copy.read_text() != text:
                copy.write_text(text)
            extension = Extension(f"{PACKAGE}.{source.stem}", [str(copy)])
            (extension,) = cythonize(extension, compiler_directives=DIRECTIVES)
        return str(folder / extension.sources[0])


def hash_of(source: Path) -> str:
    """Return the hash of a module's source."""
    return sha256(source.read_bytes()).hexdigest()


class BuildPackages(build_py):
    """Copies the packages, and notes the commit."""

    def run(self) -> None:
        """Copy the files."""
        super().run()
        if not self.editable_mode:  # then the clone itself says it
            note_commit(Path(self.build_lib, "raydix"))


class SourceDistribution(sdist):
    """A source distribution, with the guides, the constraints and the commit."""

    def make_distribution(self) -> None:
        """Add the documents to the files of the packages, and make the archive."""
        for line in DOCUMENTS:
            self.filelist.process_template_line(line)
        super().make_distribution()

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the files."""
        super().make_release_tree(base_dir, files)
        note_commit(Path(base_dir))


def note_commit(root: Path) -> None:
    """Write the commit into the folder of packages `root`, if it is known."""
    if commit := run_path("schemas/version.py")["find_commit"]():
        (root / "schemas" / "commit.txt").write_text(f"{commit}\n")


def links_of(url: str, version: str) -> dict[str, str]:
    """Return the project's links, by name. There are none without an address."""
    if not url:
        return {}
    files = f"{url}/blob/v{version}"
    return {
        "Source": url,
        "Documentation": f"{files}/README.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }


def description_of(readme: str, url: str, version: str) -> str:
    """Return the README with absolute links, or without an address, with the names of the files and no picture."""

    def publish(link: re.Match[str]) -> str:
        """Return the new form of a link."""
        picture, text, target = link["picture"], link["text"], link["target"]
        path, _, anchor = target.partition("#")
        if "://" in target:
            return link[0]
        if url:
            place = f"{url}/{'raw' if picture else 'blob'}/v{version}/{path or 'README.md'}"
            return f"{picture}[{text}]({place}{'#' if anchor else ''}{anchor})"
        if picture:
            return ""
        return f"{text} (`{path}`)" if path and path != text.strip("`") else text

    parts = FENCED.split(readme)
    return "".join(part if FENCED.match(part) else LINK.sub(publish, part) for part in parts)


version = tomllib.loads(Path("pyproject.toml").read_text())["project"]["version"]
address = os.environ.get("RAYDIX_URL", "").rstrip("/")
is_plain = os.environ.get("RAYDIX_PLAIN", "0") not in ("", "0")
sources = [] if is_plain else sorted(Path("cache_core/kernels").glob("[!_]*.py"))
setup(
    long_description=description_of(Path("README.md").read_text(encoding="utf-8"), address, version),
    long_description_content_type="text/markdown",
    project_urls=links_of(address, version),
    ext_modules=[
        Extension(f"{PACKAGE}.{source.stem}", [str(source)], extra_compile_args=["-O3"], optional=True)
        for source in sources
    ],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPackages, "sdist": SourceDistribution},
)
