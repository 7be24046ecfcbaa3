"""Rules of the package's structure that neither ruff nor import-linter knows: each is read from the
sources.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "embedgeo"
MODULES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}
PRIVATE = re.compile(r"_[^_].*")

PUBLIC_UNDERSCORES = {
    "_asdict",
    "_fields",
    "_replace",
    "_make",
    "_exit",
    "_repr_html_",
    "_repr_png_",
}
"""Documented in spite of their name: of named tuples and of what notebooks show, and `os._exit`."""

FOREIGN = {
    "capture/torch_names.py": {"_C", "_getframe"}  # torch, sys
    | {
        "_EffectType",
        "_dynamo",
        "_functorch",
        "_higher_order_ops",
        "_register_effectful_op",
        "_set_fwd_grad_enabled",
    }
    | {
        "_compiled_call_impl",
        "_current_graph_task_id",
        "_is_fwd_grad_enabled",
        "_orig_mod",
        "_python_dispatch",
        "_version",
    }
    | {
        "_fsdp_use_orig_params",
        "_handle",
        "_inter_node_pg",
        "_is_root",
        "_is_view",
        "_local_tensor",
        "_parameters",
        "_reshard",
        "_runtime_utils",
    },
    "metrics/base.py": {"_apply"},  # of `torch.nn.Module`, which torchmetrics overrides, too
    "options.py": {"_actions"},  # argparse
    "training/lightning.py": {"_generate_state_key"},  # lightning
}
"""Private names of other packages, by the one module that uses them: see "Versions" in
CONTRIBUTING.md.
"""


def private_definitions(tree: ast.Module) -> set[str]:
    """Private names that a module defines: functions, classes, variables, attributes."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.arg(arg=name):
                found.add(name)
    return {name for name in found if PRIVATE.fullmatch(name)}


def imported_private_names(nodes: Iterable[ast.AST], *packages: str) -> list[str]:
    return [
        f"line {node.lineno}: {node.module}.{name.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages
        for name in node.names
        if PRIVATE.fullmatch(name.name)
    ]


def reached_private_names(nodes: Iterable[ast.AST]) -> list[tuple[str, str]]:
    """Private attributes of anything but the object whose method asks, each with its place."""
    return [
        (node.attr, f"line {node.lineno}: {ast.unparse(node)}")
        for node in nodes
        if isinstance(node, ast.Attribute)
        and PRIVATE.fullmatch(node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and not ast.unparse(node.value).startswith("super(")
    ]


def patched_names(nodes: Iterable[ast.AST]) -> list[tuple[str, str]]:
    """Names that ``getattr``, ``setattr`` or a patch is given as text, each with its place."""
    return [
        (text.value.split(".")[-1], f"line {node.lineno}: {text.value}")
        for node in nodes
        if isinstance(node, ast.Call)
        for text in node.args
        if isinstance(text, ast.Constant)
        and isinstance(text.value, str)
        and PRIVATE.search(text.value)
        if re.search("attr$|patch|mock", ast.unparse(node.func))
    ]


def test_private_names_stay_in_their_module():
    for module, tree in MODULES.items():
        nodes = [*ast.walk(tree)]
        own = private_definitions(tree) | PUBLIC_UNDERSCORES | FOREIGN.get(module, set())
        reached = [place for name, place in reached_private_names(nodes) if name not in own]
        assert imported_private_names(nodes, "embedgeo") + reached == [], module


OWN = set[str]().union(*map(private_definitions, MODULES.values()))
"""Private names that the package defines."""


def overrides_of_other_packages() -> set[str]:
    """Private methods of which each definition calls that of a base class, so that none is the
    first.
    """
    calls = defaultdict(list)
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and PRIVATE.fullmatch(node.name):
                of_base = rf"(super\(\)|\.[A-Z]\w*)\.{node.name}\("
                calls[node.name].append(re.search(of_base, ast.unparse(node)) is not None)
    return {name for name, found in calls.items() if all(found)}


OVERRIDES = overrides_of_other_packages()


def foreign_names(tree: ast.Module) -> set[str]:
    """Private names of other packages: imported, attributes (also of ``self``), overridden, or
    given as text.
    """
    nodes = [*ast.walk(tree)]
    imported, others = set(), set()
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] not in (
                "embedgeo",
                "__future__",
            ):
                imported |= {*module.split("."), *(each.name for each in node.names)}
            case ast.Import():
                imported |= {part for each in node.names for part in each.name.split(".")}
            case ast.Attribute(attr=name):
                others.add(name)
            case ast.FunctionDef(name=name) if name in OVERRIDES:
                imported.add(name)
    others |= {name for name, _ in patched_names(nodes)}
    return {
        name for name in imported | (others - OWN - PUBLIC_UNDERSCORES) if PRIVATE.fullmatch(name)
    }


def test_private_names_of_other_packages_are_listed_and_in_the_table_of_contributing():
    """Those of `capture/torch_names.py` the table has by what they tell."""
    for module, tree in MODULES.items():
        assert foreign_names(tree) == FOREIGN.get(module, set()), module
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Versions")[2]
    assert set(re.findall(r"`([\w/]+\.py)`", table)) >= FOREIGN.keys()
    listed = (names for module, names in FOREIGN.items() if "torch_names" not in module)
    assert set(re.findall(r"`(_\w+)`", table)) == set[str]().union(*listed)


def test_nothing_around_the_package_uses_its_private_names():
    known = OWN - PUBLIC_UNDERSCORES
    for folder in ("benchmarks", "examples", "research", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            nodes = [*ast.walk(ast.parse(path.read_text()))]
            reached = reached_private_names(nodes) + patched_names(nodes)
            named = imported_private_names(nodes, "embedgeo", "benchmarks", "research", "tests")
            assert named + [place for name, place in reached if name in known] == [], path


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
    """No chains of assignments, and three names in one only where one is read, too."""
    found = [
        f"{module}:{node.lineno}"
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and (len(node.targets) > 1 or _is_several_assignments(node))
    ]
    assert found == []


def _is_several_assignments(node: ast.Assign) -> bool:
    """Whether three names or more are given values of their own in one line."""
    if not (isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    targets = {ast.unparse(target) for target in node.targets[0].elts}
    read = {
        ast.unparse(part)
        for part in ast.walk(node.value)
        if isinstance(part, ast.Name | ast.Attribute)
    }
    return len(node.value.elts) >= 3 and not targets & read


def test_test_modules_take_helpers_from_helper_modules():
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.match(r"\s*(from|import) tests\.(\w+\.)*test_", line)
    ]
    assert found == []
