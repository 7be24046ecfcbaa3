"""Research is written against the public face of embedgeo alone."""

import ast
from importlib import import_module

import pytest

from tests.files import ROOT

PUBLIC = ("embedgeo", *(f"embedgeo.{name}" for name in ("functional", "metrics", "results")))
PUBLIC += ("embedgeo.report", "embedgeo.text")


def faults(source):
    """What a module imports from embedgeo, or reaches as an attribute of it, that no ``__all__``
    lists.
    """
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "embedgeo":
            names = {each.name for each in node.names if f"{node.module}.{each.name}" not in PUBLIC}
            module = node.module
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in PUBLIC:
            module, names = ast.unparse(node.value), {node.attr} - {"__version__"}
            names -= {each.removeprefix(f"{module}.") for each in PUBLIC}
        else:
            continue
        public = import_module(module).__all__ if module in PUBLIC else ()
        wrong += [(module, name) for name in names if name not in public]
    return wrong


@pytest.mark.parametrize("path", sorted((ROOT / "research").rglob("*.py")), ids=lambda p: p.stem)
def test_research_imports_public_names_only(path):
    source = path.read_text()
    assert faults(source) == []
    assert "from benchmarks" not in source
    assert "import benchmarks" not in source
