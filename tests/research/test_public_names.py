"""Research is written against the public face of embedgeo alone."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLIC = ("embedgeo", *(f"embedgeo.{name}" for name in ("functional", "metrics", "results")))
PUBLIC += ("embedgeo.report", "embedgeo.text")


def named(tree):
    """The names of embedgeo that a module imports, or reaches as attributes, with their modules."""
    known = {}  # modules, by the name that they have here
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "embedgeo":
                    known[each.asname or "embedgeo"] = each.name if each.asname else "embedgeo"
                    yield each.name, None
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "embedgeo":
            for each in node.names:
                module = f"{node.module}.{each.name}"
                if module in PUBLIC:
                    known[each.asname or each.name] = module
                else:
                    yield node.module, each.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            first, _, rest = owner.partition(".")
            module = f"{known.get(first)}.{rest}".rstrip(".")
            is_module = f"{module}.{node.attr}" in PUBLIC
            if module in PUBLIC and not is_module and node.attr != "__version__":
                yield module, node.attr


def faults(source):
    """What a module names that no ``__all__`` lists."""
    return [
        (module, name)
        for module, name in named(ast.parse(source))
        if module not in PUBLIC or name not in (None, *import_module(module).__all__)
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "research").rglob("*.py")), ids=lambda p: p.stem)
def test_research_imports_public_names_only(path):
    source = path.read_text(encoding="utf-8")
    assert faults(source) == []
    assert "from benchmarks" not in source
    assert "import benchmarks" not in source
