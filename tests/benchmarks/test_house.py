"""The size of the package in Python tokens, which joining lines does not change."""

import ast
import tokenize
from pathlib import Path

import embedgeo

TOKENS = 158_402
"""Most Python tokens of the package. The number goes down with what is removed."""

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def docstrings(source):
    """Where strings begin that are statements, as docstrings are: lines and columns."""
    return {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def num_tokens(path):
    """Tokens of a file without comments, docstrings, and what lines are made of."""
    documentation = docstrings(path.read_bytes())
    with path.open("rb") as file:
        tokens = [each for each in tokenize.tokenize(file.readline) if each.type not in _NO_CODE]
    return sum(each.type != tokenize.STRING or each.start not in documentation for each in tokens)


def test_comments_docstrings_and_lines_do_not_count(tmp_path):
    source = tmp_path / "source.py"
    source.write_text(
        '"""A module."""\n\n\ndef f(\n    x,\n):\n    """One."""\n    return x  # it\n'
    )
    assert num_tokens(source) == len(["def", "f", "(", "x", ",", ")", ":", "return", "x"])


def test_the_package_has_no_more_tokens():
    files = Path(embedgeo.__file__).parent.rglob("*.py")
    assert sum(map(num_tokens, files)) <= TOKENS
