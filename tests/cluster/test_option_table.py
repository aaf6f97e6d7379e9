"""The page of options is what the classes say, and says something of each."""

from pathlib import Path

from holdfast.cluster import cli, option_table, sources
from holdfast.cluster.config import Settings

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "options.md").read_text() == option_table.page() + "\n", "run `make options`"


def test_the_command_prints_it(capsys) -> None:
    assert cli.main(["config", "options"]) == 0
    assert capsys.readouterr().out == option_table.page() + "\n"


def test_every_option_is_on_it_and_described() -> None:
    found = [option for _, _, options in option_table.options() for option in options]
    expected = {key for key, _ in sources.keys(Settings())} - {"tenants"}
    assert {option.key for option in found if not option.key.startswith("tenants")} == expected
    assert [option.key for option in found if not option.text] == []
    assert [name for name, about, _ in option_table.options() if not about] == []
    assert not any("|" in option.text for option in found)


def test_defaults_and_kinds_are_those_of_the_classes() -> None:
    found = {option.key: option for _, _, options in option_table.options() for option in options}
    assert found["engine.page_size"].default == "`16`"
    assert found["engine.page_size"].kind == "whole number"
    assert found["server.host"].default == '`"127.0.0.1"`'
    assert found["engine.tools_guarantee"].kind == "`names`, `schema`, `off`"
    assert found["tenants[].limits.max_concurrent"].kind == "whole number, null"
    assert found["router.response_cache"].kind == "true, false"
