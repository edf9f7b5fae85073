"""Benchmarks are run seldom: a name that they take from the project must not be gone by then."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tracked import ROOT, tracked

BENCHMARKS = tracked("benchmarks", ".py")


@cache
def names_of(module: str) -> frozenset[str] | None:
    """What can be taken from a module of ours; None for any other module."""
    path = ROOT.joinpath(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    if not file.exists() or file.is_relative_to(ROOT / "benchmarks"):
        return None
    found = {child.stem for child in path.glob("*") if path.is_dir()}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {name.asname or name.name for name in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def missing(tree: ast.Module) -> list[str]:
    """Names that a file takes from modules of ours and that these do not have."""
    modules: dict[str, str] = {}
    lost = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.asname or name.name: name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                if names_of(inner) is not None:
                    modules[name.asname or name.name] = inner
                elif (names := names_of(node.module)) is not None and name.name not in names:
                    lost.append(inner)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id, "")
            names = names_of(module) if module else None
            if names is not None and node.attr not in names:
                lost.append(f"{module}.{node.attr}")
    return sorted({*lost})


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_every_name_that_a_benchmark_takes_exists(path):
    assert missing(ast.parse(path.read_text())) == []
