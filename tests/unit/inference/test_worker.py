"""The project's code in vLLM's engine process uses only what both model runners have; CUDA and CPUs use different ones.

The installed source is read, not imported: the runners need what only their machines have.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from inference.worker import WorkerExtension

OWN = ("worker.py", "adapter.py")
RUNNERS = ["vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner"]
"""The second version, which vLLM takes on CUDA, and the first, from which the one for CPUs is derived."""


def parsed(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text())


def is_runner(node: ast.expr) -> bool:
    """Returns True if the expression is the model runner: `self.model_runner`, or `runner`, as our code calls it."""
    return ast.unparse(node) in ("self.model_runner", "runner")


def asked_of_the_runner() -> set[str]:
    """Names of the runner's attributes that our code uses."""
    directory = Path(find_spec(WorkerExtension.__module__).origin).parent  # type: ignore[union-attr, arg-type]
    nodes = [node for name in OWN for node in ast.walk(ast.parse((directory / name).read_text()))]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_runner(node.value)}


def attributes(module: str, name: str) -> set[str]:
    """Names of the attributes of class `name` in vLLM's `module`: its own, those that its methods assign to `self`, and
    those that it inherits within vLLM."""
    tree = parsed(module)
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    names = {node.name for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(found):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    for statement in found.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    sources = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm")
        for alias in node.names
    }
    bases = [sources[base.id] for base in found.bases if isinstance(base, ast.Name) and base.id in sources]
    return names.union(*(attributes(*base) for base in bases))


@pytest.mark.parametrize("module", RUNNERS)
def test_each_of_vllms_runners_has_what_is_asked_of_it(module: str) -> None:
    asked = asked_of_the_runner()
    assert {"get_model", "lora_manager"} <= asked
    assert asked <= attributes(module, "GPUModelRunner")
