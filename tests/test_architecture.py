"""Imports point one way: the table of docs/architecture.md, enforced."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "clusterenv"

# Who may import whom. A name is a package, or a module directly under clusterenv.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "rollout": set(),
    "wire": {"errors", "config"},
    "policy": {"errors", "config"},
    "head": {"errors", "config", "rollout", "wire", "policy", "launchers.base"},
    "worker": {"errors", "config", "wire", "policy"},
    "launchers": {"errors", "config", "wire.ticket"},
    "adapters": {"errors", "policy", "factories"},
    "factories": {"errors", "wire.assignment"},
    "sample": {"errors", "factories"},
    "actions": {"wire.layout"},
    "resets": set(),
    "inline": {"head.outcome", "policy", "rollout", "wire", "worker.shard", "worker.infos"},
    "plan": {"factories", "sample", "wire.assignment"},
    "start": {"errors", "config", "factories", "plan", "head", "launchers.base", "wire"},
    "exchange": {"errors", "head", "inline", "wire.layout"},
    "vector": {"actions", "head", "inline", "resets", "sample", "wire.layout"},
    "env": {
        "errors", "config", "rollout", "head", "launchers", "policy", "adapters",
        "factories", "sample", "plan", "actions", "exchange", "inline", "start", "vector",
    },
    "doctor": {"errors", "config", "launchers", "wire", "env"},
    "cli": {"errors", "config", "launchers", "wire.ticket", "doctor"},
    "__main__": {"cli"},
}  # fmt: skip

FRAMEWORKS = {"torch", "jax", "ray", "kubernetes", "matplotlib", "stable_baselines3", "envpool", "tensorflow"}


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem not in ("__init__",))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            module = node.module or ""
            # `from clusterenv.wire import messages` imports the module clusterenv.wire.messages.
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_imports_only_what_the_table_allows(path: Path) -> None:
    name = name_of(path)
    group = name.split(".")[0]
    allowed = ALLOWED[group] | ({group} if "." in name else {name})
    for target in imports_of(path):
        if not target.startswith("clusterenv."):
            continue
        inner = target.removeprefix("clusterenv.")
        assert any(inner == entry or inner.startswith(f"{entry}.") for entry in allowed), f"{name} imports {inner}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_only_adapters_import_a_framework(path: Path) -> None:
    if name_of(path).startswith("adapters."):
        return
    assert not {target.split(".")[0] for target in imports_of(path)} & FRAMEWORKS


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_files_stay_short_enough_to_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("name", ["head", "wire"])
def test_the_head_never_unpickles(name: str) -> None:
    for path in [*(SOURCE / name).rglob("*.py"), SOURCE / "env.py"]:
        text = path.read_text()
        assert "pickle.loads" not in text, path
        assert "pickle.load(" not in text, path
        assert "Unpickler" not in text, path
