"""The wheel: it builds without the network, holds everything and nothing else, and works away from the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from c_kernels import ABLE, BUILD, COMPILER

from holdfast.kernels import attention, attention_plan, layer, linear, linear_state
from holdfast.replicas.speculation import ngrams

ROOT = Path(__file__).parent.parent
FOLDERS = ("kernels", "replicas", "router", "cluster", "loadgen")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so")  # what an editable install has built there
CACHE = BUILD["CACHE"]  # of the compiler: an editable install has filled it
MODULES = (attention, attention_plan, layer, linear, linear_state, ngrams)
LIBRARIES = {f"holdfast/kernels/{each.LIBRARY.path.name}" for each in MODULES}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools leaves its work beside the sources; with the cache of the checkout."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=LEFT_OUT)
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source / name)
    CACHE.mkdir(parents=True, exist_ok=True)
    (source / "build").mkdir()
    (source / "build" / CACHE.name).symlink_to(CACHE)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", str(out), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(out.glob("holdfast-*.whl"))


def test_it_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    paths = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    expected = {f"holdfast/{path.relative_to(ROOT)}" for path in paths if "__pycache__" not in path.parts}
    assert inside - LIBRARIES == expected - LIBRARIES


@pytest.mark.skipif(not (ABLE and COMPILER), reason="the kernels in C are for x86-64 on Linux, and ziglang builds them")
def test_its_libraries_need_an_old_libc_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as inside:
        assert {name for name in inside.namelist() if name.endswith(".so")} == LIBRARIES
        for library in LIBRARIES:
            told = inside.read(library).split(b"GLIBC_")[1:]
            versions = {tuple(map(int, part.split(b"\0")[0].split(b"."))) for part in told}
            assert max(versions, default=(2, 0)) <= (2, 17)


def test_it_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(place)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    script = "import holdfast.cluster.cli as cli, sys; print(cli.__file__); sys.exit(cli.main(['config']))"
    environment = {**os.environ, "PYTHONPATH": str(place)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    where, _, printed = done.stdout.partition("\n")
    assert Path(where).is_relative_to(place)
    assert printed.startswith("server:")
    assert (place / "bin" / "holdfast").exists()
