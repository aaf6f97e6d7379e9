"""The command line: help for everything, one clear line for what is wrong, and no Ray before it is needed."""

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from holdfast.cluster import cli, config_file
from holdfast.router.tenants import hash_key


def test_help_explains_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for command in chain(*cli.GROUPS.values()):
        line = next(line for line in printed.splitlines() if line.strip().startswith(f"{command} "))
        assert len(line.split()) > 3
        with pytest.raises(SystemExit) as caught:
            cli.main([command, "--help"])
        assert caught.value.code == 0
        assert "usage:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("holdfast ")


def test_without_a_command_it_shows_what_one_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    for heading, names in cli.GROUPS.items():
        at = lines.index(heading)
        assert {line.split()[0] for line in lines[at + 1 : lines.index("", at)] if line[2] != " "} <= {*names}
    assert cli.REST not in lines  # every command has its group
    for example, _ in cli.EXAMPLES:
        assert any(line.startswith(f"  {example} ") for line in lines[lines.index("Examples") :])
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("words", [words.split()[1:] for words, _ in cli.EXAMPLES])
def test_the_examples_are_arguments_that_there_are(words: list[str]) -> None:
    assert hasattr(cli._parser().parse_args(words), "run")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("fly", "holdfast: unknown command fly; there are serve, chat,"),
        ("sreve", "holdfast: unknown command sreve; did you mean serve?"),
        ("serve --prot 1", "holdfast serve: unknown option --prot; did you mean --port?"),
        ("serve --prot=1", "holdfast serve: unknown option --prot; did you mean --port?"),
        ("serve --wings", "holdfast serve: unknown option --wings\n"),
        ("serve now", "holdfast serve: one word too many: now\n"),
        ("serve --port x", "holdfast serve: argument --port: invalid int value: 'x'"),
        ("status --jsno", "holdfast status: unknown option --jsno; did you mean --json?"),
        ("config chek", "holdfast config: unknown command chek; did you mean check?"),
        ("bench compare --sever a=b", "holdfast bench compare: unknown option --sever; did you mean --server?"),
    ],
)
def test_misuse_is_told_by_the_command_that_was_meant(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words.split())
    assert caught.value.code == cli.MISUSE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 2


def test_what_is_no_yaml_is_one_line_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("server: {port: 1\nengine: [\n")
    assert cli.main(["config", "check", str(path)]) == cli.MISUSE
    assert capsys.readouterr().out == f"{path}:2: not YAML: expected ',' or '}}', but got ':'\n"
    assert cli.main(["serve", "--config", str(path)]) == cli.MISUSE
    assert capsys.readouterr().err.startswith(f"holdfast: {path}: not YAML: line 2, column 7: expected ',' or '}}'")
    path.write_text("[1, 2]\n")
    assert cli.main(["config", "check", str(path)]) == cli.MISUSE
    assert capsys.readouterr().out.endswith("not list\n")


@pytest.mark.parametrize(
    ("words", "text", "field"),
    [
        (["--port", "0"], "", "server.port"),
        (["--model", "/nowhere"], "", "engine.model"),
        (["--replicas", "-1"], "", "replicas.count"),
        (["--host", "0.0.0.0"], "", "server.host"),
        ([], "server: {prot: 1}", "server.prot"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(
    words: list[str], text: str, field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert cli.main(["serve", "--config", str(tmp_path / "c.yaml"), *words]) == cli.MISUSE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("holdfast: ")
    assert printed.err.endswith(f"[{field}]\n")
    assert printed.err.count("\n") == 1


def test_config_prints_what_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--port", "9", "--replicas", "2"]) == 0
    settings = config_file.parse(capsys.readouterr().out)
    assert settings.server.port == 9
    assert settings.replicas.count == 2


def test_a_key_fits_the_configuration_printed_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["key", "acme"]) == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    tenant = config_file.parse(rest).tenants[0]
    assert tenant.name == "acme"
    assert tenant.key_hashes == (hash_key(first.rpartition(" ")[2]),)
    assert cli.main(["key", "a/b"]) == cli.MISUSE


def test_a_refused_start_has_not_imported_ray(tmp_path: Path) -> None:
    script = (
        "import sys; from holdfast.cluster.cli import main; code = main(['serve', '--model', '/nowhere']);"
        "print(code, 'ray' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2 False False\n"


@pytest.mark.parametrize("command", ["show", "options"])
def test_who_stops_reading_early_sees_no_traceback(command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        words = [sys.executable, "-c", "import sys; from holdfast.cluster.cli import main; sys.exit(main())"]
        words += ["config", command]
        done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (cli.FAILED, "")
