"""Rules of structure that neither ruff nor import-linter knows: each is read from the sources."""

import ast
import re
from collections import defaultdict

from tests.files import ROOT

PACKAGE = ROOT / "src" / "embedgeo"
MODULES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}


def test_no_class_has_exactly_one_subclass():
    """A base class with one subclass is a class in two places; protocols are not counted."""
    defined, subclasses = set(), defaultdict(set)
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined.add(node.name)
                for base in node.bases:
                    subclasses[ast.unparse(base).split("[")[0]].add(node.name)
    protocols = subclasses["Protocol"]
    single = {
        name: found
        for name, found in subclasses.items()
        if len(found) == 1 and name in defined - protocols
    }
    assert single == {}


def test_a_line_is_a_statement():
    found = [
        f"{module}:{node.lineno}"
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and len(node.targets) > 1
    ]
    assert found == []


def test_test_modules_take_helpers_from_helper_modules():
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.match(r"\s*(from|import) tests\.(\w+\.)*test_", line)
    ]
    assert found == []
