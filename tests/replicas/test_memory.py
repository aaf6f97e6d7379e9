"""The memory of a machine, and of a container in it."""

from pathlib import Path

from holdfast.replicas import memory


def test_memory_of_a_machine_and_of_a_container() -> None:
    meminfo = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 500 kB\nHugePages_Total: 0\n"
    assert memory._memory(meminfo, None) == (1000 << 10, 500 << 10)
    assert memory._memory(meminfo, (100, 40)) == (100, 40)
    assert memory._memory(meminfo, (1 << 40, 1 << 39)) == (1000 << 10, 500 << 10)


def test_what_is_left_of_a_container(tmp_path: Path) -> None:
    assert memory._container(tmp_path) is None
    for name, text in (("max", "1000\n"), ("current", "700\n"), ("stat", "anon 500\ninactive_file 150\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory._container(tmp_path) == (1000, 450)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container(tmp_path) is None
