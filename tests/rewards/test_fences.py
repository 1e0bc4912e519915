"""Which program of a completion is run: blocks are those of CommonMark, and any text has one or none, soon."""

import time

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from vipfast.rewards.code import program


@pytest.mark.parametrize(
    ("completion", "source"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("```py\nprint(1)\n```\n", "print(1)"),
        ("``` Python3\nprint(1)\n```", "print(1)"),
        ("first\n```python\nprint(1)\n```\nbetter\n```python\nprint(2)\n```", "print(2)"),
        ("```python\nprint(1)\n```\nwhich prints\n```\n1\n```", "print(1)"),
        ("```\nprint(1)\n```", "print(1)"),
        ("```text\nprint(1)\n```", None),
        ("```python\nprint(1)\n```\n```bash\nls\n```", "print(1)"),
        ("print(1)", None),
        ("", None),
        ("```python\nprint(1)", None),
        ("```python\nprint(1)\n```\nor\n```python\nprint(2)", "print(1)"),
        ("```python\nprint(1)\n```python\nprint(2)\n```", "print(2)"),
        ("1. So:\n   ```python\n   if 1:\n       print(1)\n   ```", "if 1:\n    print(1)"),
        ("<think>```python\nprint(1)\n```</think>\n```python\nprint(2)\n```", "print(2)"),
        ("<think>\n```python\nprint(1)\n```\n</think> I do not know.", None),
        ("<think>\n```python\nprint(1)\n```", None),
        ("```python\n```", ""),
        ("````python\nprint(1)\n````", "print(1)"),
        ("````python\nprint(1)\n```\nprint(2)\n`````", "print(1)\n```\nprint(2)"),
        ("````python\nprint(1)\n```", None),
        ("~~~python\nprint(1)\n~~~", "print(1)"),
        ("~~~~ py ```\nprint(1)\n```\n~~~\n~~~~~", "print(1)\n```\n~~~"),
        ("~~~python\nprint(1)\n```", None),
        ('```python title="a"\nprint(1)\n```', "print(1)"),
        ("```Python linenos\nprint(1)\n```  \r", "print(1)"),
        ("```pythonic\nprint(1)\n```", None),
        ("```python ```\nprint(1)\n```", None),  # a span of code, and a block that is not closed
        ('```python\ntext = """\n    ```\n    """\n```', 'text = """\n    ```\n    """'),
        ("```python\nprint(1)\n   ```", "print(1)"),
        ("````text\n```python\nprint(1)\n```\n````", None),
        ("   ```python\n  if 1:\n     print(1)\n   ```", "if 1:\n  print(1)"),
    ],
)
def test_program_is_the_last_closed_python_block_outside_the_thinking_part(completion, source):
    assert program(completion) == source


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["```", "python", "\n", "<think>", "</think>", "x = 1", " ", "`", "\r", "\0"]), max_size=40))
@example(["```python\n"] * 3)
def test_any_text_has_a_program_or_none(parts):
    found = program("".join(parts))
    answer = "".join(parts).rpartition("</think>")[2].partition("<think>")[0]
    assert found is None or found.replace(" ", "") in answer.replace(" ", "")


parse = MarkdownIt("commonmark").parse
LINES = st.sampled_from(
    ["```", "````", "~~~", "~~~~~", "```python", "````py", "~~~python x", "~~~ ```", "``` a", "x = 1", "", "   ```", "    ```"]
    + ["    ~~~", "  x = 2", "`` `", "``` `"]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(LINES, max_size=14))
@example(["```", "x = 1", "```", "```python", "  x = 2", "    ```", "   ````"])
def test_blocks_are_those_of_commonmark(lines):
    """As an independent parser finds them, but where vipfast means to differ: fences in lists, and Python in an open block."""
    blocks = [token for token in parse("\n".join([*lines, "end"])) if token.type == "fence"]
    assume(not any("py" in token.content or lines[token.map[0]].startswith(" ") for token in blocks))
    rest = [token for token in parse("\n".join(lines)) if token.type in ("code_block", "inline")]
    assume(not any(mark in token.content for token in rest for mark in ("```", "~~~")))
    found = {"python": None, "": None}
    for token in blocks:
        if "end" not in token.content:  # which only a block that is not closed can hold
            word = (token.info.split() or [""])[0]
            found["python" if word == "py" else word] = token.content.removesuffix("\n")
    assert program("\n".join(lines)) == (found[""] if found["python"] is None else found["python"])


def test_a_text_full_of_fences_is_read_in_linear_time():
    start = time.perf_counter()
    program("```python\n" * 200_000), program("```\n" * 200_000), program("<think>" * 200_000)
    (
        program("`" * 10**6 + "x`"),
        program("~" * 10**6),
        program("\n".join(["```python" + "`" * 1000] * 1000)),
        program(" " * 10**6),
    )
    assert time.perf_counter() - start < 5
