"""The Dockerfiles. Nothing builds them here: they are read, and what they install goes into an empty environment."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfiles import FOLDER, ROOT, Stage, ignored, pip_installs, read
from helm_chart import CHART
from packaging.utils import canonicalize_name
from packaging.version import Version

VARIANTS = ("gpu", "cpu")


@pytest.fixture(params=VARIANTS)
def stages(request: pytest.FixtureRequest) -> list[Stage]:
    return read(request.param)


def test_there_is_one_for_each_variant_of_the_chart() -> None:
    assert {path.name.partition(".")[0] for path in FOLDER.glob("*.Dockerfile")} == set(VARIANTS)


def test_bases_are_pinned(stages: list[Stage]) -> None:
    for stage in stages:
        image, _, tag = stage.base.partition(" ")[0].partition(":")
        assert image == "python"
        assert re.fullmatch(r"3\.11\.\d+-slim-\w+@sha256:[0-9a-f]{64}", tag), stage.base


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_digest_pins_both_stages(variant: str) -> None:
    """The same in both files, and another one by `--build-arg DIGEST=@sha256:...`."""
    text = (FOLDER / f"{variant}.Dockerfile").read_text()
    bases = {stage.base.partition(" ")[0] for variant in VARIANTS for stage in read(variant)}
    assert len(bases) == 1
    assert re.search(r"^ARG DIGEST=@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert len(re.findall(r"^FROM python:\$\{PYTHON\}\$\{DIGEST\}( AS build)?$", text, re.MULTILINE)) == 2


def test_the_gpu_image_names_the_driver_that_its_torch_needs() -> None:
    """CUDA's own minimum: a driver of branch 580 for every release of CUDA 13."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    assert pinned["cuda-toolkit"].partition(".")[0] == "13"
    assert read("gpu")[-1].environment["NVIDIA_REQUIRE_CUDA"] == "cuda>=13.0"
    assert "580 or later" in (FOLDER / "gpu.Dockerfile").read_text()


def test_a_container_sees_no_gpu_unless_it_is_given_one() -> None:
    assert read("gpu")[-1].environment["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_every_path_that_is_copied_is_there(stages: list[Stage]) -> None:
    paths = [path for stage in stages for sources, _ in stage.copied for path in sources]
    assert len(paths) > 5
    for path in paths:
        assert (ROOT / path).exists(), path
        assert not ignored(path), path


def test_every_package_is_copied(stages: list[Stage]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {name.split(".")[1] for name in project["tool"]["setuptools"]["packages"]}
    copied = {path for sources, _ in stages[0].copied for path in sources}
    assert folders | {"pyproject.toml", "setup.py", "constraints.txt", project["project"]["readme"]} <= copied


def test_everything_is_installed_by_the_constraints(stages: list[Stage]) -> None:
    build = stages[0]
    words = [word for word, argument in build.instructions]
    first_pip = next(i for i, (word, argument) in enumerate(build.instructions) if "pip install" in argument)
    assert build.environment["PIP_CONSTRAINT"] == "/src/constraints.txt"
    assert words.index("ENV") < first_pip
    assert build.of("WORKDIR") == ["/src"]
    assert not any("pip install" in each for each in stages[1].of("RUN"))


def test_what_runs_has_no_rights(stages: list[Stage]) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurityContext"]
    user = f"{values['runAsUser']}:{values['runAsGroup']}"
    final = stages[-1]
    assert final.of("USER") == [user]
    assert final.instructions.index(("USER", user)) > max(
        i for i, (word, _) in enumerate(final.instructions) if word == "RUN"
    )
    assert any(f"--uid {values['runAsUser']}" in each for each in final.of("RUN"))


def test_code_beside_the_working_folder_is_not_imported(stages: list[Stage]) -> None:
    assert stages[-1].environment["PYTHONSAFEPATH"] == "1"


def test_a_login_shell_finds_the_commands(stages: list[Stage]) -> None:
    """Debian's /etc/profile sets PATH anew, and the operator starts Ray through a login shell."""
    assert (["docker/profile.sh"], "/etc/profile.d/holdfast.sh") in stages[-1].copied
    folder = stages[-1].environment["PATH"].partition(":")[0]
    assert f"PATH={folder}:" in (FOLDER / "profile.sh").read_text()
    assert any(
        each == f"--from=build {folder.removesuffix('/bin')} {folder.removesuffix('/bin')}"
        for each in stages[-1].of("COPY")
    )


def test_the_haproxy_that_ray_starts_is_made_with_the_image(stages: list[Stage]) -> None:
    build, final = stages
    script = final.environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
    assert build.of("RUN")[-1] == f"python -m holdfast.cluster.haproxy {script}"
    assert script.startswith(final.environment["PATH"].partition(":")[0])


def test_both_install_the_same() -> None:
    """But for where torch comes from."""
    gpu, cpu = (read(variant)[0].instructions for variant in VARIANTS)
    assert [each for each in gpu if each not in cpu] == [
        ("RUN", "python requirements.py > requirements.txt && pip install -r requirements.txt")
    ]
    assert len(gpu) == len(cpu)


def test_the_dependencies_are_the_projects() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "requirements.py")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert done.stdout.split("\n")[:-1] == [*project["dependencies"], *project["optional-dependencies"]["tracing"]]


@pytest.mark.skipif(
    not os.environ.get("HOLDFAST_TEST_INDEX"), reason="`make images` asks a package index: HOLDFAST_TEST_INDEX=1"
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_an_image_installs_can_be_resolved(variant: str, tmp_path: Path) -> None:
    """Each `pip install` of the Dockerfile with its own arguments, as a dry run that reads metadata alone.

    The GPU's must not see what pip is set up with on this machine: a torch without CUDA there would be taken instead.
    """
    python = empty_environment(tmp_path / "empty")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    certificate = {key: os.environ[key] for key in ("PIP_CERT",) if key in os.environ}
    bare = kept | certificate | {"PIP_CONFIG_FILE": os.devnull, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    if dry_run(python, bare, tmp_path, "--no-deps", "packaging").returncode:
        pytest.skip("no package index can be reached")
    requirements = subprocess.run(
        [sys.executable, FOLDER / "requirements.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (tmp_path / "requirements.txt").write_text(requirements.stdout)
    installed: dict[str, str] = {}
    for arguments in pip_installs(read(variant)[0]):
        done = dry_run(python, bare, tmp_path, *arguments)
        if done.returncode and "--index-url" in arguments:
            # The index of torch without CUDA may be out of reach; what pip is set up with here may have one.
            own = dict(os.environ) | {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
            at = arguments.index("--index-url")
            done = dry_run(python, own, tmp_path, *arguments[:at], *arguments[at + 2 :])
        assert done.returncode == 0, done.stderr[-2000:]
        installed |= pretend_installed(json.loads(done.stdout), tmp_path / "empty")
    if variant == "cpu" and "+cpu" not in installed["torch"]:
        pytest.skip("no index with a torch without CUDA can be reached")
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    found = {name: Version(version).public for name, version in installed.items()}
    expected = {canonicalize_name(name): version for name, version in pinned.items()}
    assert {
        name: version for name, version in found.items() if Version(version) != Version(expected.get(name, "0"))
    } == {}
    assert ("triton" in installed) == (variant == "gpu")


def empty_environment(folder: Path) -> Path:
    """The interpreter of a new environment with nothing but pip."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def dry_run(
    python: Path, environment: dict[str, str], folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """`pip install` that installs nothing and prints what it would, as JSON."""
    command = [python, "-m", "pip", "install", "--dry-run", "--quiet", "--only-binary", ":all:", "--report", "-"]
    return subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def pretend_installed(report: dict[str, Any], environment: Path) -> dict[str, str]:
    """Versions by name of what pip's report would install; the environment has their metadata from now on."""
    (site,) = environment.glob("lib/python3*/site-packages")
    found = {}
    for each in report["install"]:
        metadata = each["metadata"]
        folder = site / f"{metadata['name'].replace('-', '_')}-{metadata['version']}.dist-info"
        folder.mkdir()
        needs = "".join(f"Requires-Dist: {need}\n" for need in metadata.get("requires_dist", ()))
        head = f"Metadata-Version: 2.1\nName: {metadata['name']}\nVersion: {metadata['version']}\n"
        (folder / "METADATA").write_text(head + needs)
        found[canonicalize_name(metadata["name"])] = metadata["version"]
    return found


@pytest.mark.skipif(
    not os.environ.get("HOLDFAST_TEST_IMAGES"), reason="takes minutes and an index: asked for by HOLDFAST_TEST_IMAGES=1"
)
def test_the_cpu_image_installs_and_works(tmp_path: Path) -> None:
    """Every RUN of the build, in an empty environment, with torch from whatever index pip is set up for."""
    build, final = read("cpu")
    source, place = tmp_path / "src", tmp_path / "holdfast"
    source.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    bin_of_base = str(Path(sys.base_prefix) / "bin")

    def here(text: str) -> str:
        text = re.sub(r"--index-url \S+ ", "", text)
        text = text.replace("/opt/holdfast", str(place)).replace("/src", str(source))
        return text.replace("$PATH", f"{bin_of_base}:/usr/local/bin:/usr/bin:/bin").replace(
            "python -m venv", f"{sys.executable} -m venv"
        )

    for word, argument in build.instructions:
        if word == "ENV":
            environment |= dict(re.findall(r"(\w+)=(\S+)", here(argument)))
        elif word == "COPY":
            *paths, _ = argument.split()
            for path in paths:
                copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
                copy(ROOT / path, source / Path(path).name)  # type: ignore[operator]
        elif word == "RUN":
            done = subprocess.run(
                here(argument), shell=True, cwd=source, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr[-3000:]
    shutil.rmtree(source)
    empty = tmp_path / "empty"
    empty.mkdir()
    run = {"PATH": here(final.environment["PATH"]), "PYTHONSAFEPATH": "1", "HOME": str(empty)}
    for command in (
        "holdfast config",
        "hf download --help",
        "ray --version",
        "python -c 'import holdfast.cluster.serve_config'",
    ):
        done = subprocess.run(command, shell=True, cwd=empty, env=run, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    assert not (place / "bin" / "pip").exists()
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    print(f"{size / 2**20:.0f} MiB installed")
