import pytest

from holdfast.replicas.retention.latency import Called, called, commands


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("grep -rn TODO src", ("grep",)),
        ("cd /repo && pytest -q || true", ("cd", "pytest", "true")),
        ("cd /repo &&\n  FLAG=1 OTHER='x' pytest -q", ("cd", "pytest")),
        ("cat a | head", ("cat",)),
        ("", ()),
        ("X=1", ()),
        ("&& ls", ("ls",)),
        ("grep -n 'a && b' src||ls", ("grep", "ls")),
        ('NAME="a b" pytest', ("pytest",)),
        ('"/opt/my tools/lint" src && cd "a b"', ("/opt/my tools/lint", "cd")),
        ("FLAG=1 \\\n  pytest -q 2>&1 | tail", ("pytest",)),
        ("# don't stop\ncat a#1 && ls", ("cat", "ls")),
        ("make && cat > note <<EOF\nit's done && over\nEOF", ("make", "cat")),
    ],
)
def test_the_first_word_of_each_part_is_the_tool(block, words):
    assert commands(f"I look around.\n\n```bash\n{block}\n```\n") == words


@pytest.mark.parametrize(
    "text", ["no block", "```bash\nls\n```\nor\n```bash\nrm\n```", "```python\nls\n```", "```bash\nls", "```bash ls```"]
)
def test_no_block_or_several_name_no_tool(text):
    assert commands(text) == ()


def test_calls_of_the_function_interface_count_and_text_does_not():
    text = "```bash\nls\n```"
    assert called(["grep", "sed", "grep"], text, interface=True, cut=False, ends=False) == Called(("grep", "sed"))
    assert called([], text, interface=True, cut=False, ends=False) == Called((), last=True)
    assert called([], text, interface=False, cut=False, ends=False) == Called(("ls",))


def test_the_last_turn_is_a_final_answer_or_the_one_that_says_so():
    for cut, ends, last in ((False, False, True), (True, False, False), (True, True, True)):
        assert called([], "done", interface=False, cut=cut, ends=ends) == Called((), last)
    assert called(["grep"], "", interface=True, cut=False, ends=True) == Called(("grep",), last=True)
